"""Breaks of kvdock/connectors/vllm/; most guards need the environments of `make test-vllm`."""

from __future__ import annotations

from .mutant import Mutant

SCHEDULER, WORKER = "kvdock/connectors/vllm/scheduler.py", "kvdock/connectors/vllm/worker.py"
STORES, TABLES = "kvdock/connectors/vllm/scheduler.py", "kvdock/connectors/vllm/tables.py"
DEPENDENCES, WEIGHTS = "kvdock/connectors/vllm/identity.py", "kvdock/connectors/weights.py"
IDENTITY = ("tests/connectors/test_vllm_identity.py",)
BY_HAND = ("tests/connectors/test_vllm_scheduler.py",)
TAGS, TAGGED = ("tests/connectors/test_vllm_request_tag.py",), ("tests/vllm/test_tags.py", "-k")
SPANS = ("tests/vllm/test_request_spans.py", "-k", "0.24.0")
PRESSURE = ("tests/vllm/test_scheduler.py", "-k", "under_pressure_nothing_wrong and 0.24.0")

MUTANTS = (
    Mutant(
        "P17", "a chunk is whole when any of its parts is", "kvdock/connectors/verify.py",
        "if not matches}",
        "if not matches} - {chunk for (chunk, _), matches in zip(parts, found, strict=True) if matches}",
        ("tests/connectors/test_verify.py",), "test_one_damaged_part_makes_its_chunk_a_miss_that_goes",
    ),
    Mutant(
        "V1", "a resumed request's blocks are appended to its table", TABLES,
        "if ids is not None and request_id not in cached.resumed_req_ids:", "if ids is not None:",
        BY_HAND, "test_a_resumed_request_is_stored_from_its_new_blocks",
    ),
    Mutant(
        "V2", "the null block of a resumed request counts as block 0", TABLES,
        "return [block or None for block in blocks]", "return list(blocks)",
        PRESSURE, "", equivalent="`_offer` takes the same blocks out of the table",
    ),
    Mutant(
        "V2b", "the null blocks of an allocation count as block 0", "kvdock/connectors/vllm/connector.py",
        "[[None if block.is_null else block.block_id for", "[[block.block_id for",
        ("tests/vllm/test_scheduler.py", "-k", "every_position_is_right and 0.24.0"),
        "test_a_prefix_is_loaded_and_every_position_is_right",
    ),
    Mutant(
        "V2c", "blocks that a window has left behind stay in the table", SCHEDULER,
        "                column[:gone] = [None] * gone\n", "                del gone\n",
        BY_HAND, "test_blocks_that_a_window_left_behind_are_not_stored_late",
    ),
    Mutant(
        "V3", "a load that could not begin is reported as loaded", WORKER,
        "self._outcomes.add(load.order, load.order.plan.local_tokens)",
        "self._outcomes.add(load.order, load.order.plan.hit_tokens)",
        ("tests/vllm/test_parallel.py", "-k", "without_a_server and 0.24.0"),
        "test_a_worker_without_a_server_reports_its_loads_and_stores",
    ),
    Mutant(
        "V4", "blocks that a running request grows into do not fence stores", TABLES,
        "                self._fresh.update(filter(None, column))\n", "                pass\n",
        PRESSURE, "test_under_pressure_nothing_wrong_is_read_and_all_requests_end",
    ),
    Mutant(
        "V4b", "a store that was sent is not fenced", STORES,
        "                    fences.append(store_id)\n", "                    pass\n",
        PRESSURE, "test_under_pressure_nothing_wrong_is_read_and_all_requests_end",
    ),
    Mutant(
        "V4c", "the worker does not wait for fenced stores", WORKER,
        "            copies.wait(None)\n", "            pass\n",
        PRESSURE, "test_under_pressure_nothing_wrong_is_read_and_all_requests_end",
    ),
    Mutant(
        "V5a", "the manifest has the type of the model, not of the KV cache", "kvdock/connectors/vllm/identity.py",
        "kv_dtype=_kv_dtype(str(vllm_config.cache_config.cache_dtype), model, tensors)", "kv_dtype=str(model.dtype)",
        ("tests/connectors/test_vllm_settings.py",),
        "test_engines_whose_caches_differ_in_their_type_alone_share_nothing",
    ),
    Mutant(
        "V5b", "the manifest says that there is one rank", "kvdock/connectors/vllm/identity.py",
        "tensor_parallel=place.heads_split,", "tensor_parallel=1,",
        ("tests/vllm/test_parallel.py", "-k", "0.24.0"), "",
        equivalent="writers, the bytes of a part and the signature differ as well",
    ),
    Mutant(
        "V5d", "the revision leaves out the quantization and the type", DEPENDENCES,
        "    return dict(_unusual(model, UNUSUAL_MODEL))\n", "    return {}\n",
        ("tests/connectors/test_vllm_settings.py",),
        "test_the_models_quantization_and_type_are_part_of_what_kv_depends_on",
    ),
    Mutant(
        "V5e", "KV of long and of short rotary factors is shared", DEPENDENCES,
        "found_kinds.append([kind, is_beyond])", "found_kinds.append([kind])",
        IDENTITY, "test_longrope_engines_share_while_they_use_the_same_factors",
    ),
    Mutant(
        "V5f", "max_model_len keeps all engines apart", DEPENDENCES,
        "        if kind in NEVER:\n            continue\n", "",
        IDENTITY, "test_max_model_len_means_nothing_where_positions_do_not_depend_on_it",
    ),
    Mutant(
        "V5g", "the digest of no file stands for a model", WEIGHTS,
        "    raise _unknown(f\"no file in", "    return []\n    raise _unknown(f\"no file in",
        IDENTITY, "test_weights_that_nothing_tells_apart_are_refused_until_they_have_a_name",
    ),
    Mutant(
        "V5h", "weights that are streamed have the digest of the folder beside them", WEIGHTS,
        "if getattr(model, \"model_weights\", \"\"):", "if False:",
        IDENTITY, "test_weights_that_nothing_tells_apart_are_refused_until_they_have_a_name",
    ),
    Mutant(
        "V5i", "the served name keeps engines of one model apart", "kvdock/connectors/vllm/identity.py",
        "model=str(model.architecture)[:MOST_LETTERS]", "model=served_name(model)",
        IDENTITY, "test_engines_share_whatever_they_call_the_model",
    ),
    Mutant(
        "V5j", "a model of the hub is told by its name, its files on disk by what they hold", WEIGHTS,
        "path if path.is_dir() else find_snapshot(model.model, model.revision, load.download_dir)",
        "path if path.is_dir() else None",
        IDENTITY, "test_one_models_files_have_one_digest_wherever_they_lie",
    ),
    Mutant(
        "V6", "a load counts as far as the rank that got most", "kvdock/connectors/plans.py",
        "return min(ranks", "return max(ranks",
        BY_HAND, "test_reports_of_ranks_add_up_and_a_load_counts_as_far_as_in_the_rank_that_got_least",
    ),
    Mutant(
        "V8", "stores of steps that read what did not come are kept", STORES,
        "not store.is_sent and request_id in (None, store.request_id)", "not store.is_sent and request_id is not None",
        ("tests/vllm/test_layers.py", "-k", "undone and 0.24.0"), "test_nothing_is_stored_of_a_step_that_was_undone",
    ),
    Mutant(
        "V9", "a request whose load is under way at a reset is stored afterwards", SCHEDULER,
        "            tracked.is_old = True\n", "            pass\n",
        BY_HAND, "test_a_request_whose_load_is_under_way_at_a_reset_is_not_stored",
    ),
    Mutant(
        "V10", "drafts count as computed", SCHEDULER,
        "min(before + count, request.num_tokens)", "before + count",
        PRESSURE, "", equivalent="`begin_store` ends at the keys of known tokens",
    ),
    Mutant(
        "V11", "the blocks of a failed load begin one chunk late", WORKER,
        "if (piece.chunk + 1) * plan.chunk_tokens > valid", "if piece.chunk * plan.chunk_tokens > valid",
        ("tests/vllm/test_scheduler.py", "-k", "damaged_as_its_load and 0.24.0"),
        "test_a_chunk_damaged_as_its_load_begins_is_computed",
    ),
    Mutant(
        "V12", "a load never waits for steps under way", SCHEDULER,
        "waits=self._next.in_flight.touches(blocks)", "waits=False",
        ("tests/vllm/test_undone.py", "-k", "under_way and 0.33.0"),
        "test_a_load_into_blocks_that_a_step_under_way_still_writes_comes_after_it",
    ),
    Mutant(
        "V12b", "what a window leaves behind next is not used by its step", TABLES,
        "else group.left_behind(computed)", "else computed",
        BY_HAND, "test_a_load_comes_after_a_step_that_reads_what_the_window_leaves_behind_next",
    ),
    Mutant(
        "V13", "a request that vLLM begins anew keeps what it had offered", SCHEDULER,
        "            self._connector.stores.offer_again([request_id])\n", "",
        ("tests/vllm/test_undone.py", "-k", "goes_on and 0.24.0"),
        "test_a_request_that_goes_on_stores_what_it_computes_again",
    ),
    Mutant(
        "V14", "a store begins when the one before is published", WORKER,
        "self._publishing.run(self._publish, store", "self._storing.run(self._publish, store",
        ("tests/connectors/test_vllm_worker.py",),
        "test_a_step_does_not_wait_until_the_server_knows_of_a_store_or_of_the_one_before",
    ),
    Mutant(
        "V15", "a store whose blocks a step gives away is dropped", SCHEDULER,
        "        stores = self._stores.send()\n"
        "        fences = self._stores.guard(self._next.overwritten)\n",
        "        fences = self._stores.guard(self._next.overwritten)\n"
        "        stores = self._stores.send()\n",
        ("tests/vllm/test_undone.py", "-k", "read_before and 0.33.0"),
        "test_what_a_request_stores_as_it_ends_is_read_before_its_blocks_are_written",
    ),
    Mutant(
        "V16a", "an adapter is known by its name", "kvdock/connectors/vllm/request_tag.py",
        '"adapter": met.adapter.digest.hex(), ', "",
        TAGS, "test_adapters_are_told_apart_by_their_files",
    ),
    Mutant(
        "V16b", "an adapter written after the start is trusted", "kvdock/connectors/vllm/adapters.py",
        "adapter.look.changed_ns + CLOCK_TICK_NS > since_ns", "False",
        (*TAGGED, "may_have_read_before and 0.24.0"),
        "test_an_adapter_that_vllm_may_have_read_before_is_not_cached_and_said",
    ),
    Mutant(
        "V16c", "an adapter's files are looked at once", "kvdock/connectors/vllm/adapters.py",
        "            if self._look(adapter) != adapter.look:\n                adapter.why",
        "            if False:\n                adapter.why",
        TAGS, "test_an_adapter_that_changes_while_a_request_runs_is_seen_with_the_next_step",
    ),
    Mutant(
        "V16d", "a name may stand for another adapter", "kvdock/connectors/vllm/adapters.py",
        "        elif adapter.path != asked.lora_path:\n", "        elif False:\n",
        (*TAGGED, "became_another_one and name-0.24.0"),
        "test_an_adapter_that_became_another_one_is_not_cached_any_more",
    ),
    Mutant(
        "V16e", "a number may stand for another adapter", "kvdock/connectors/vllm/adapters.py",
        "        if first is not adapter:\n", "        if False:\n",
        (*TAGGED, "became_another_one and number-0.24.0"),
        "test_an_adapter_that_became_another_one_is_not_cached_any_more",
    ),
    Mutant(
        "V16f", "links to adapters do not count", "kvdock/connectors/vllm/adapters.py",
        "*(one for one in above if S_ISLNK(one.st_mode))", "",
        TAGS, "test_a_link_made_after_the_start_may_have_led_elsewhere_before",
    ),
    Mutant(
        "V16g", "an adapter that was read unheard is trusted from its first request on",
        "kvdock/connectors/vllm/adapters.py",
        "self._settled_ns(adapter) if self._hears() else self._began_ns", "self._settled_ns(adapter)",
        ("tests/connectors/test_vllm_adapters.py",),
        "test_an_adapter_written_after_the_start_is_known_if_it_was_met_before_vllm_read_it",
    ),
    Mutant(
        "V16h", "files that were written a moment ago get no tick", "kvdock/connectors/vllm/adapters.py",
        "if 0 <= rest_ns <= CLOCK_TICK_NS:", "if False:",
        ("tests/connectors/test_vllm_adapters.py",),
        "test_files_that_were_written_a_moment_ago_get_a_tick_of_the_clock",
    ),
    Mutant(
        "V16i", "what vLLM declares unfit is loaded", SCHEDULER,
        "not self._engine.unfit and not getattr", "not getattr",
        ("tests/vllm/test_unfit.py", "-k", "experts and 0.33.0"),
        "test_what_vllm_declares_unfit_is_stored_and_not_loaded",
    ),
    Mutant(
        "V16j", "workers at another server count", "kvdock/connectors/vllm/setup.py",
        "return set(self._epochs.values()) == {attachment.epoch}", "return True",
        ("tests/connectors/test_vllm_unfit.py",),
        "test_all_workers_are_where_the_scheduler_is_before_a_load_is_promised",
    ),
    Mutant(
        "V17a", "an image is known by its name", "kvdock/connectors/vllm/request_tag.py",
        "json.dumps([feature.modality, named.digest.hex(), chosen])", "json.dumps([feature.modality, chosen])",
        TAGS, "test_keys_are_shared_as_far_as_requests_are_alike",
    ),
    Mutant(
        "V17b", "where an image stands does not count", "kvdock/protocol/keys.py",
        'struct.pack("<QQ", mark.start, mark.end) + mark.digest', "mark.digest",
        TAGS, "test_keys_are_shared_as_far_as_requests_are_alike",
    ),
    Mutant(
        "V17c", "a name that stood for two images is trusted", "kvdock/connectors/vllm/request_tag.py",
        "if found is None or named.digest not in (None, found):", "if found is None:",
        (*TAGGED, "stood_for_two and hashes-0.24.0"), "test_a_name_that_stood_for_two_images_is_not_trusted",
    ),
    Mutant(
        "V17d", "an image that is not here is forgotten", "kvdock/connectors/vllm/request_tag.py",
        "            if data is None:\n                named.is_sound = False\n",
        "            if data is None:\n                pass\n",
        (*TAGGED, "not_here and 0.24.0"), "test_images_that_are_not_here_are_not_cached",
    ),
    Mutant(
        "V17e", "an address is hashed as an image", "kvdock/connectors/tensors.py",
        '        raise Unhashable(f"found {type(found).__name__}, wanted a tensor in memory")\n',
        '        digest.update(repr(found).encode())\n        return\n',
        TAGS, "test_what_cannot_be_hashed_is_not_cached",
    ),
    Mutant(
        "V17f", "a prompt that grew does not count", "kvdock/connectors/vllm/request_tag.py",
        "if met.media and (self._has_grown or any(", "if met.media and (any(",
        (*TAGGED, "prompt_that_grew and 0.24.0"), "test_images_are_not_trusted_after_a_prompt_that_grew",
    ),
    Mutant(
        "V18a", "a salt does not count", "kvdock/connectors/vllm/request_tag.py",
        '                met.inputs["salt"] = request.cache_salt\n', "                pass\n",
        TAGS, "test_keys_are_shared_as_far_as_requests_are_alike",
    ),
    Mutant(
        "V18b", "embeddings do not count", "kvdock/connectors/vllm/request_tag.py",
        '            inputs["embeddings"] = met.embeddings\n', "            pass\n",
        TAGS, "test_keys_are_shared_as_far_as_requests_are_alike",
    ),
    Mutant(
        "V18c", "a tag does not reach the keys", "kvdock/connectors/vllm/request_tag.py",
        "tagged(namespace, tag.of_all)", "namespace",
        TAGS, "test_keys_are_shared_as_far_as_requests_are_alike",
    ),
    Mutant(
        "V18d", "a request whose tag is not known has the keys of a plain one", "kvdock/connectors/vllm/request_tag.py",
        "        return _NoKeys()\n", "        tag = PLAIN\n",
        TAGS, "test_a_plain_request_has_the_keys_that_it_always_had",
    ),
    Mutant(
        "V18e", "a request that asks not to be stored is stored", SCHEDULER,
        "return self._outcomes.asked(tracked.request).store and ", "return ",
        (*TAGGED, "say_what and 0.24.0"), "test_requests_say_what_is_done_for_them_and_hear_what_came_of_it",
    ),
    Mutant(
        "V20", "a prefix of chunked local attention needs its last tokens only", "kvdock/connectors/vllm/groups.py",
        "window = max(1, local - 1)", "window = 1",
        ("tests/vllm/test_scheduler.py", "-k", "prefix_is_loaded and local and 0.33.0"),
        "test_a_prefix_is_loaded_and_every_position_is_right",
    ),
    Mutant(
        "V21", "what another connector failed to load is stored", "kvdock/connectors/vllm/connector.py",
        "            self._scheduler.loads_failed()  # perhaps another connector's\n", "            pass\n",
        ("tests/vllm/test_beside.py", "-k", "sync and recompute and 0.24.0"),
        "test_what_was_computed_from_a_load_of_another_connector_that_failed_is_not_stored",
    ),
    Mutant(
        "V21b", "a store is sent before it is known what another connector has loaded", STORES,
        "if waits and store.holds:", "if self.step < store.step:",
        ("tests/vllm/test_beside.py", "-k", "overlapping and sync and recompute and 0.33.0"),
        "test_what_was_computed_from_a_load_of_another_connector_that_failed_is_not_stored",
    ),
    Mutant(
        "V21c", "what a request that ended in an error has computed is stored", SCHEDULER,
        "            self._stores.drop_unsent(request_id)\n", "            pass\n",
        BY_HAND, "test_what_a_request_that_ends_in_an_error_has_not_sent_is_not_stored",
    ),
    Mutant(
        "V23", "beside others the manifest goes with the handshake all the same", "kvdock/connectors/vllm/connector.py",
        "return None if self._is_beside else self._handshake", "return self._handshake",
        ("tests/vllm/test_beside.py", "-k", "handshake and behind and 0.33.0"),
        "test_a_connector_with_a_handshake_of_its_own_may_stand_before_it_or_behind",
    ),
    Mutant(
        "V23b", "beside others the first requests do not wait for the manifest", "kvdock/connectors/vllm/connector.py",
        "return (None if is_soon else 0), False", "return 0, False",
        ("tests/vllm/test_beside.py", "-k", "handshake and behind and 0.33.0"),
        "test_a_connector_with_a_handshake_of_its_own_may_stand_before_it_or_behind",
    ),
    Mutant(
        "V24", "the warning of a policy looks at the connector's own entry", "kvdock/connectors/vllm/connector.py",
        "(transfer if engine is None else engine.kv_transfer_config).kv_load", "transfer.kv_load",
        ("tests/vllm/test_beside.py", "-k", "warns and 0.33.0"),
        "test_beside_others_it_warns_by_the_policy_that_counts",
    ),
    Mutant(
        "V25", "MultiConnector finds the connector in no registry", "kvdock/connectors/vllm/plugin.py",
        "KVConnectorFactory.register_connector(NAME,", "print(KVConnectorFactory,",
        ("tests/vllm/test_beside.py", "-k", "knows_it and 0.33.0"),
        "test_vllm_knows_it_by_its_name_and_multiconnector_reads_its_statistics",
    ),
    Mutant(
        "V22", "blocks that vLLM gives a request without naming them do not fence stores", TABLES,
        "            self._unnamed.add(tracked.request.request_id)\n", "            pass\n",
        ("tests/vllm/test_beside.py", "-k", "read_before and 0.24.0"),
        "test_beside_another_connector_stores_are_read_before_their_blocks_are_written",
    ),
    Mutant(
        "V28", "what the newest steps compute is stored beside them", "kvdock/connectors/vllm/tables.py",
        "if before < tokens), self.steps[0][0])", "if before < 0), self.steps[0][0] - 9)",
        BY_HAND, "test_what_was_computed_long_ago_is_stored_beside_steps_under_way",
    ),
    Mutant(
        "V29", "a load does not come after the stores that read its blocks", "kvdock/connectors/vllm/worker.py",
        "self._come_after(store.copies, self._kv.stream if waits else self._kv.aside)", "pass",
        ("tests/connectors/test_vllm_worker.py",),
        "test_a_load_waits_for_the_copies_of_a_store_that_reads_its_blocks",
    ),
    Mutant(
        "V30", "a step does not come after stores of what its request was loaded into", TABLES,
        "                self._fresh |= one.given\n", "",
        BY_HAND, "test_a_store_holds_up_the_load_of_its_blocks_and_no_step_before_that_request_runs",
    ),
    Mutant(
        "V27", "vLLM keeps a request's blocks when it has ended", "kvdock/connectors/vllm/connector.py",
        "return False, self._scheduler.finished(", "return True, self._scheduler.finished(",
        ("tests/vllm/test_upstream.py",), "test_vllms_own_tests_pass_with_kvdock_as_the_connector",
    ),
    Mutant(
        "V31", "after a reset that sets apart, requests share as before", SCHEDULER,
        """        if self._resets.on_reset == "apart":
            self.weights_change("changed")
""", "",
        ("tests/vllm/test_tags.py", "-k", "kept_apart and tokens-0.33.0"),
        "test_weights_that_may_have_changed_are_kept_apart_and_named_weights_are_shared",
    ),
    Mutant(
        "V33", "what runs across a change of weights is stored", SCHEDULER,
        "        if self._weights.epoch != epoch:\n", "        if False:\n",
        BY_HAND, "test_what_was_computed_before_a_change_is_not_stored_after_it",
    ),
    Mutant(
        "V33b", "what begins behind KV of earlier weights is stored", SCHEDULER,
        " or (self._weights.is_stale and local_tokens > 0)", "",
        BY_HAND, "test_behind_kv_of_earlier_weights_nothing_is_stored_or_looked_up",
    ),
    Mutant(
        "V33c", "a load that is under way when the weights change succeeds", WORKER,
        "            valid = plan.local_tokens\n", "            pass\n",
        ("tests/connectors/test_vllm_worker.py",), "test_a_load_that_is_under_way_when_the_weights_change_fails",
    ),
    Mutant(
        "V33d", "a method that nobody knows leaves the weights alone", "kvdock/connectors/vllm/weight_changes.py",
        '        return ""\n    return "changed"\n', '        return ""\n    return ""\n',
        ("tests/connectors/test_vllm_weight_changes.py",),
        "test_what_is_not_known_to_leave_weights_alone_counts_as_a_change",
    ),
    Mutant(
        "V33e", "a hook that was replaced counts as in force", "kvdock/connectors/vllm/weight_changes.py",
        "        if self not in probe.heard:\n", "        if False:\n",
        ("tests/connectors/test_vllm_weight_changes.py",), "test_a_hook_whose_place_was_taken_is_not_in_force",
    ),
    Mutant(
        "V33f", "a version counts for ever", "kvdock/connectors/running_weights.py",
        "            self._spoilt.add(version)\n", "            pass\n",
        ("tests/connectors/test_running_weights.py",),
        "test_a_version_that_stands_for_two_sets_of_weights_is_not_trusted",
    ),
    Mutant(
        "V32", "KV memory goes while stores copy from it", WORKER,
        "            self._come_after(store.copies, None)\n", "            pass\n",
        ("tests/connectors/test_vllm_worker.py",), "test_what_writes_or_ends_blocks_waits_for_a_stores_copies",
    ),
    Mutant(
        "V40", "a recurrent state that steps still change is stored", TABLES,
        "block if end in boundaries or (index, block, end) in states else None", "block",
        BY_HAND, "test_a_state_is_stored_where_a_step_ends_or_begins_at_the_boundary_of_its_block",
    ),
    Mutant(
        "V41", "a state that vLLM hands over is stored from wherever its column has a block", TABLES,
        "(index, block, end) in states", "end in {after for _, _, after in states}",
        BY_HAND, "test_a_state_that_vllm_hands_over_is_stored_if_it_is_where_it_is_said_to_be",
    ),
    Mutant(
        "V42", "a hit may end where no state is stored", "kvdock/connectors/vllm/groups.py",
        "window, state = 1, ", "window, state = 0, ",
        ("tests/connectors/test_vllm_states.py",), "test_a_state_is_a_window_of_one_token_and_a_chunk_is_one_block",
    ),
    Mutant(
        "V43", "a vLLM that reads states which are not there starts", "kvdock/connectors/vllm/groups.py",
        "enable_prefix_caching and not reconciles:", "enable_prefix_caching and False:",
        ("tests/connectors/test_vllm_states.py",), "test_a_vllm_that_reads_states_which_are_not_there_is_refused",
    ),
    Mutant(
        "V44", "a load of states takes blocks that vLLM did not count", SCHEDULER,
        "if self._engine.has_states and not tracked.is_async:", "if False:",
        ("tests/vllm/test_states.py", "-k", "under_pressure_no_state"),
        "test_under_pressure_no_state_is_read_that_is_not_right",
    ),
    Mutant(
        "V45", "engines share states of other types", "kvdock/connectors/vllm/groups.py",
        "{group.state and f'/{group.state}'}", "",
        ("tests/connectors/test_vllm_states.py",), "test_engines_whose_states_differ_inside_a_page_never_meet",
    ),
    Mutant(
        "V46", "nobody hears of a request before its step", "kvdock/connectors/vllm/connector.py",
        "            listen()\n", "            pass\n",
        ("tests/vllm/test_tiers.py", "-k", "while_the_step"),
        "test_tiers_load_for_a_request_while_the_step_runs_in_which_it_comes",
    ),
    Mutant(
        "V47", "two threads of vLLM are let in at a time", "kvdock/connectors/vllm/arrivals.py",
        "        with self.turn:\n", "        if True:\n",
        ("tests/connectors/test_arrivals.py",), "test_one_thread_at_a_time_is_let_in_and_may_call_on",
    ),
    Mutant(
        "V48", "what vLLM refuses is waited for", SCHEDULER,
        "for request_id in self._arrivals.refused():", "for request_id in ():",
        ("tests/vllm/test_metrics.py", "-k", "refuses"),
        "test_what_vllm_receives_and_refuses_leaves_nothing_behind",
    ),
    Mutant(
        "V49", "kvdock's spans stand beside vLLM's", TABLES,
        'headers.get(HEADER, headers.get("traceparent"))', 'headers.get("traceparent")',
        SPANS, "test_what_kvdock_hears_of_a_request_is_the_id_of_the_span_that_vllm_makes_later",
    ),
    Mutant(
        "V50", "vLLM's span has another id than was drawn for it", "kvdock/connectors/vllm/request_spans.py",
        "if wanted is None else wanted.span_id", "if wanted is None or wanted else 0",
        SPANS, "test_what_kvdock_hears_of_a_request_is_the_id_of_the_span_that_vllm_makes_later",
    ),
    Mutant(
        "V51", "kvdock makes spans of requests that vLLM does not sample", "kvdock/connectors/vllm/request_spans.py",
        "{is_sampled:02x}", "01", SPANS, "test_of_a_request_that_is_not_sampled_neither_makes_a_span",
    ),
)
