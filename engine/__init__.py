"""kvdock's small real engine: paged KV, continuous batching, prefix caching, preemption, on CPU.

Start reading at engine.py; scheduler.py decides, model.py and attention.py compute. With several ranks, crew.py
starts the processes of the others, which are rank.py, and team.py adds what they computed. The engine
knows kvdock only through connectors/interface.py.
"""
