"""For those who keep their own loop: callbacks for Lightning and for the Hugging Face Trainer.

Nothing here imports either library; `dessilbi.adapters.lightning` and `dessilbi.adapters.huggingface` do.
"""
