"""Execution of forward passes: one door, behind which are eager runs, recorded programs and CUDA graphs."""
