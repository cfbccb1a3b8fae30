"""kvdock's small real engine: paged KV, continuous batching, prefix caching and preemption, on the CPU.

Start reading at engine/engine.py; scheduler.py decides, model.py and attention.py compute.
"""
