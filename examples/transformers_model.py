"""A model you loaded yourself, token ids instead of text, and a logits processor of your own."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import draftproof as dp

folder = dp.embedded("demo")
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(folder)
letter_e = torch.tensor(
    [token for text, token in tokenizer.get_vocab().items() if "e" in text.lower()]
)


def without_the_letter_e(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A function of the prefix and the scores, as transformers' LogitsProcessor."""
    return scores.index_fill(-1, letter_e, -torch.inf)


engine = dp.load(model, assistant_model="demo-draft", tokenizer=tokenizer, dtype="float32")
prompt = tokenizer("A big dog ran").input_ids
done = engine.generate(
    [prompt], max_new_tokens=30, sampling=dp.Sampling(processors=(without_the_letter_e,))
)[0]
print("A big dog ran" + done.text)
print("no letter e:", "e" not in done.text.lower())
