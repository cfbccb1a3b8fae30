"""The status page: plain ES modules. The server serves index.html at `/` and this folder at `/static/`."""
