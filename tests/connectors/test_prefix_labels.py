"""The label of requests, from the connector's preference to the server's list of prefixes."""

from __future__ import annotations

from api_helpers import ServerProcess, eventually
from connector_helpers import CHUNK, PER_CHUNK, Rig, tokens_of

from kvdock.client.client import Client
from kvdock.connectors.scheduler import Preference
from kvdock.protocol.keys import chunk_keys


def test_a_label_of_requests_names_what_their_prompts_share() -> None:
    shared = tokens_of(1, 3)
    with ServerProcess() as server, Client(server.unix) as client, Rig(server.unix) as rig:
        for number in (2, 3):
            request, tokens = f"r{number}", [*shared, *tokens_of(number, 2)]
            wanted = rig.connector.begin_store(request, tokens, [list(range(5 * PER_CHUNK))], len(tokens))
            rig.connector.scheduler.hint(request, [Preference(label="support bot")])
            assert wanted
            rig.wait_store(request, wanted)
            rig.connector.finished(request)
        last = [key.hex() for key in chunk_keys(rig.attachment.namespace, shared, CHUNK)][-1]

        def is_shared_part_labelled() -> bool:
            rows = client.prefixes(search="SUPPORT").prefixes
            return len(rows) == 1 and rows[0].fork_key == last and rows[0].labels == ["support bot"]

        eventually(is_shared_part_labelled)
        found = client.prefixes(namespace=rows_namespace(client), below=last)
        assert [one.labels for one in found.prefixes] == [[], []], "the label is of the common part alone"


def rows_namespace(client: Client) -> str:
    (row,) = client.prefixes(search="support bot").prefixes
    return row.namespace
