"""The check of a GPU: TTFT and decoding of our engine in the shape of a real model beside its limits."""
