"""What runs beside the weights: runners, their device state, graphs and the ranks' processes.

Owns start-up, KV memory, CUDA graphs, inputs and sampling on the device. Imports models,
layers, attention, kernels and `engine.distributed`; never the scheduler.
"""
