"""Long prompts of pretrained decoders: opened prompts and caches with levels of precision, judged.

Perplexity of what follows a prompt, numbers hidden in it, greedy continuations, and time, each
beside the same model with softmax attention: `python -m reproduction.long_context --help`.
"""
