"""The data plane beside `torch.distributed.pipelining`."""
