"""The tier on Mooncake Store, a distributed store in the memory of many hosts (docs/operate/tiers_mooncake.md)."""
