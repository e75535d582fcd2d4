"""The real scheduler and block pool over a cost model of the hardware instead of a model."""
