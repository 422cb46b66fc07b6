"""The same text, sooner: one prompt, plain and with a draft model."""

import draftproof as dp

prompt = "Once upon a time, there was a little"
plain = dp.load("demo", drafter="none").generate(prompt, max_new_tokens=60)[0]
drafted = dp.load("demo", assistant_model="demo-draft").generate(prompt, max_new_tokens=60)[0]

print(prompt + drafted.text)
print(f"the same tokens: {plain.tokens == drafted.tokens}")
print(
    f"tokens per target forward: {drafted.stats.tokens_per_round:.2f},",
    f"acceptance rate {drafted.stats.acceptance:.2f}",
)
