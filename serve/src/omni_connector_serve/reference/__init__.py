"""A small omni-modal model, split as Encode -> Prefill -> Decode -> Generate, to prove a pipeline with.

It is real (an image encoder, a decoder-only transformer with a paged KV cache, a synthesiser) and seeded, and
its arithmetic is exact (see `.exact`): however the work is cut into processes, ranks and chunks, the same
request gives the same bits.
"""
