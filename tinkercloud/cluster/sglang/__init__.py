"""What runs inside an SGLang engine process: our sampler and weight digests."""

from tinkercloud.config import stand_ins_start_method

if stand_ins_start_method() is not None:
    # Here, since every process of an engine comes by before it imports SGLang.
    from tinkercloud.cluster.cpu import engines

    engines.install()
