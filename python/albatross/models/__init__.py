"""RWKV-7 as a model: reading checkpoints, the forward pass over packed tokens, and the pool of recurrent states.

Knows nothing of requests, sampling or text. The engine's model runner is its user.
"""
