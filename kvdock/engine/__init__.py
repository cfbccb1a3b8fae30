"""kvdock's small real engine: paged KV, continuous batching, prefix caching and preemption, on the CPU.

Start reading at kvdock/engine/engine.py; scheduler.py decides, model.py and attention.py compute. With several ranks,
process_group.py starts a process for each of the others, which runs rank.py, and team.py adds up what they computed.
"""
