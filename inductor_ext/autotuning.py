"""placeholder"""
CustomOpConfig = None
def register_custom_op_autotuning(*a, **k): raise NotImplementedError
