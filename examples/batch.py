"""A batch: each row has its own sampling, stops and length; no row waits for another."""

import draftproof as dp

engine = dp.load("demo", assistant_model="demo-draft")
prompts = ["Once upon a time", "Tom found a red ball.", '"Help!" said the frog.']
params = [
    dp.Sampling(),
    dp.Sampling(temperature=0.7, seed=1, stop=("\n",)),
    dp.Sampling(
        temperature=1.0, top_k=20, repetition_penalty=1.2, max_new_tokens=20, logprobs=True
    ),
]
for done in engine.generate(prompts, max_new_tokens=40, sampling=params):
    print(
        f"{prompts[done.prompt]}{done.text}\n  -> {len(done.tokens)} tokens, {done.finish_reason}"
    )

for sample in engine.generate(
    "The little fish", n=3, max_new_tokens=15, sampling=dp.Sampling(temperature=1.0, seed=4)
):
    print(f"sample {sample.sample}: The little fish{sample.text}")
