"""The planner: looks at what workers publish, and gives each pool the size that the targets need.

    directory ─▶ view.py: a FleetView ─▶ decide.py: Decisions, pure ─▶ process.py: carries them out, tells of them
                                                                          └▶ actuators.py: roles, Ray, Kubernetes
capacity.py is the arithmetic of `headrace plan`: how large the pools should be to begin with.
"""
