"""Triangle attention: templates, operand layout, float64 reference and workloads.

Nothing is imported here: the registry loads templates without torch, and only `layout`, `reference`, `inputs` and `workload`
need torch.
"""
