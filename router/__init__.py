"""The router: front door, admission, choice of workers, and the one leg that each request has to its decode worker.

Torch-free: its image stays small and it starts fast.
"""
