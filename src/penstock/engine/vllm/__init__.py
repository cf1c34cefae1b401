"""vLLM as the target's engine, under Penstock's scheduler: its models, kernels and workers. Nothing
outside knows it but `penstock.engine.backends`, which imports it once it is chosen."""
