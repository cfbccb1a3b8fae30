"""The entry point of vLLM's group of general plugins: vLLM calls it in each of its processes."""

from __future__ import annotations

from contextlib import suppress

NAME = "KvdockConnector"


def register() -> None:
    """Registers the connector's name with vLLM. May be called any number of times."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # it is known already
        KVConnectorFactory.register_connector(NAME, __name__.rpartition(".")[0], NAME)
