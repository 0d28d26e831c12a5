"""Number formats and rules of rounding that several plugins share: FP8, FP4, NVFP4 and 8-bit AdamW.

They are a library of the core because no plugin imports another: a recipe, a weight format and a kernel pack may need
one format. The ops of a format have their plain-PyTorch references here, and kernel packs offer faster
implementations. Plugins choose a format: nothing in the core uses one by itself.
"""
