"""kvdock's small engine, a real one: paged KV, continuous batching, prefix caching and preemption, on the CPU.

Start reading at kvdock/engine/engine.py. scheduler.py decides which requests run, blocks.py which blocks they hold;
model.py and kv_cache.py compute, with weights that are drawn, or read by trained.py; kvdock/engine/kvdock.py connects
the engine to the server. With several ranks, ranks.py starts and runs the processes of the others.
"""
