"""Two chats in one batch, decoded through kvbackend's pages.

    python examples/transformers_generate.py [MODEL FOLDER OR .gguf FILE]

Without an argument it takes the model that `kvbackend run` takes.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbackend import model_store
from kvbackend.integrations.transformers import new_cache, patch

QUESTIONS = ["What is the capital of France?", "Name three colours of the rainbow."]

_, folder = model_store.locate(sys.argv[1] if len(sys.argv) > 1 else None, lambda step: print(step, file=sys.stderr))
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

patch(model, block_size=16)  # from here on generate() reads and writes kvbackend's pages

chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
inputs = tokenizer.apply_chat_template(
    chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
)
cache = new_cache(model)  # only to look at it afterwards; generate() makes one by itself
tokens = model.generate(**inputs, max_new_tokens=32, do_sample=False, cache=cache)
for question, row in zip(QUESTIONS, tokens[:, inputs["input_ids"].shape[1] :], strict=True):
    print(f"{question}\n    {tokenizer.decode(row, skip_special_tokens=True)}")
print(cache.pages)
