cd /tmp/pol; .venv/bin/python -m bench.replay --json --trace /work/shared/data/mooncake_conversation_trace.jsonl --policies default
.venv/bin/python -m bench.replay --json --trace /work/shared/data/agent_sessions_trace.jsonl.gz --policies default --rooms 448 622 1024
.venv/bin/python -m bench.replay --json --trace /work/shared/data/agent_sessions_trace.jsonl.gz --policies default --rooms 448 --sessions 30 --longest 65536
