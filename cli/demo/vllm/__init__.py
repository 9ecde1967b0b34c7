"""``loadbox demo --engine vllm``: a vLLM server on the CPU with a tiny random model, steered by its mailboxes."""
