"""The pools of other nodes as a lower tier that is only read (docs/operate/peers.md)."""
