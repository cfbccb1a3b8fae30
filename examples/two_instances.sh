#!/bin/sh
# Two instances of vLLM, or of SGLang, share one kvdock server: the second loads what the first has computed.
#
#     MODEL=folder-or-name sh examples/two_instances.sh
#     ENGINE=sglang MODEL=folder-or-name sh examples/two_instances.sh
#
# Needs `kvdock`, `curl` and `vllm` or `sglang` on the PATH, and memory for both instances (GPU_SHARE of it for each).
# VLLM_ARGS has more arguments for `vllm serve`, SGLANG_ARGS for `sglang serve`, separated by spaces. LOGS: an existing
# folder for the logs. CLIENT: a command that runs in place of the prompts once both instances answer, as
# examples/reinforce.py.
set -eu
: "${MODEL:?name the model}"
ENGINE=${ENGINE:-vllm}
GPU_SHARE=${GPU_SHARE:-0.4}
POOL=${POOL:-8GiB}
VLLM_ARGS=${VLLM_ARGS:-}
SGLANG_ARGS=${SGLANG_ARGS:-}
SENTENCES=${SENTENCES:-100}
FIRST=${FIRST:-8101}
SECOND=${SECOND:-8102}

folder=$(mktemp -d)
LOGS=${LOGS:-$folder}
CLIENT=${CLIENT:-}
pids=""
end() {
    for pid in $pids; do kill "$pid" 2>/dev/null || true; done
    for pid in $pids; do wait "$pid" 2>/dev/null || true; done
    rm -rf "$folder"
}
trap end EXIT INT TERM
answers() { # name, pid, command: waits until the command succeeds
    name=$1 pid=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        kill -0 "$pid" 2>/dev/null || { echo "$name ended:" >&2; tail -20 "$LOGS/$name.log" >&2; exit 1; }
        sleep 1
    done
}

export KVDOCK_SOCKET_PATH="$folder/kvdock.sock" # for the server, the instances and the commands
unset KVDOCK_ADDRESS                             # which would name another server
kvdock serve --port 0 --pool-bytes "$POOL" >"$LOGS/kvdock.log" 2>&1 &
pids="$pids $!"
answers kvdock $! kvdock status

serve() { # port
    # shellcheck disable=SC2086  # several arguments
    case $ENGINE in
    vllm)
        exec vllm serve "$MODEL" $VLLM_ARGS --host 127.0.0.1 --port "$1" --gpu-memory-utilization "$GPU_SHARE" \
            --served-model-name model --enable-prompt-tokens-details \
            --kv-transfer-config '{"kv_connector":"KvdockConnector","kv_role":"kv_both"}'
        ;;
    sglang)
        SGLANG_KVDOCK=1 exec sglang serve --model-path "$MODEL" $SGLANG_ARGS --host 127.0.0.1 --port "$1" \
            --mem-fraction-static "$GPU_SHARE" --page-size 64 --served-model-name model --enable-cache-report
        ;;
    *)
        echo "ENGINE: found $ENGINE, wanted vllm or sglang"
        exit 2
        ;;
    esac
}
for port in "$FIRST" "$SECOND"; do
    serve "$port" >"$LOGS/$port.log" 2>&1 &
    pids="$pids $!"
    answers "$port" $! curl -fs "http://127.0.0.1:$port/health"
done

if [ -n "$CLIENT" ]; then
    export ENGINE FIRST SECOND MODEL
    $CLIENT # several words
    exit
fi
prompt=$(yes "The quick brown fox jumps over the lazy dog." | head -n "$SENTENCES" | tr '\n' ' ')
for port in "$FIRST" "$SECOND"; do
    echo "instance at port $port:"
    curl -sS --fail-with-body "http://127.0.0.1:$port/v1/completions" -H 'content-type: application/json' \
        -d "{\"model\": \"model\", \"prompt\": \"$prompt\", \"max_tokens\": 16, \"temperature\": 0}"
    echo
    sleep 1 # an answer comes a moment before what was computed for it has been stored
done
kvdock status
