"""Sampling with a seed: any drafter, any tree, any batch, one text."""

import draftproof as dp

sampling = dp.Sampling(temperature=0.8, top_p=0.95, seed=7)
prompt = "The dragon opened the door and"
engines = {
    "plain": dp.load("demo", drafter="none"),
    "prompt lookup": dp.load("demo", drafter="prompt-lookup"),
    "draft model": dp.load("demo", assistant_model="demo-draft"),
    "a tree of drafts": dp.load(
        "demo", assistant_model="demo-draft", draft_tree=dp.TreeShape.branching((3, 2, 1))
    ),
}
texts = {
    name: engine.generate(prompt, max_new_tokens=50, sampling=sampling)[0].text
    for name, engine in engines.items()
}
alone = texts["plain"]
batch = [prompt, "Once", "A cat sat"]
texts["in a batch"] = (
    engines["draft model"].generate(batch, max_new_tokens=50, sampling=sampling)[0].text
)

print(prompt + alone)
for name, text in texts.items():
    print(f"{name:>16}: {'the same' if text == alone else 'DIFFERENT'}")
