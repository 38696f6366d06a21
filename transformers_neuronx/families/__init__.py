"""Families in one file each: decoders with another's graph and weight table, LLaMA's in most, and what differs.

A file is named after the configuration's `model_type`, in letters and digits. It has a configuration and a class.
"""

# Families whose maths and names are those of another.
SAME_AS = {
    "granitemoe": "granitemoeshared",
    "internlm3": "llama",
    "iquestcoder": "llama",
    "kimik2": "deepseekv3",
}
