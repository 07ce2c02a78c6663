"""Stands in for SGLang's compiled kernels, so that its CPU path can be imported without them.

SGLang's CPU modules import helpers for speculative decoding and for moving the KV cache by name. Scoring with
`--attention-backend torch_native` calls none of them. Nothing is registered under `torch.ops.sgl_kernel`, so it sees
no AMX kernels and computes every layer in plain PyTorch: slowly, and with the same results.
"""


def __getattr__(name):  # type: ignore[no-untyped-def]
    if not name.endswith("_cpu"):  # what else is asked for must look absent
        raise AttributeError(name)

    def absent(*arguments, **options):  # type: ignore[no-untyped-def]
        raise NotImplementedError(f"{name} needs SGLang's compiled kernels, which are not installed here")

    return absent
