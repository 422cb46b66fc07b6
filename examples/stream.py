"""Text as it is written: draft tokens that stood in [brackets]."""

import draftproof as dp

engine = dp.load("demo", assistant_model="demo-draft")
for chunk in engine.stream("Lily and Tom went to the park.", max_new_tokens=60):
    for piece, drafted in chunk.pieces:
        print(f"[{piece}]" if drafted else piece, end="", flush=True)
    if chunk.completion:
        print(f"\n{chunk.completion.finish_reason}: {chunk.completion.stats.rounds} rounds")
