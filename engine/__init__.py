"""kvdock's small real engine: paged KV, continuous batching, prefix caching, preemption, on CPU.

Start reading at engine.py; scheduler.py decides, model.py and attention.py compute. The engine
knows kvdock only through connectors/interface.py.
"""
