"""A drafting method in one class: what followed this token last time follows again."""

import torch

import draftproof as dp


class LastFollower(dp.Drafter):
    """Proposes one token: the one that followed the most recent earlier occurrence of the root."""

    name = "last-follower"
    max_draft_tokens = 1

    def propose(self, frontier: dp.Frontier) -> dp.TokenTree:
        prefix, root = frontier.prefix, frontier.prefix.root[:, None]
        if frontier.max_draft_tokens == 0:
            return dp.TokenTree.chain(root)
        places = torch.arange(prefix.tokens.shape[1])
        seen = (prefix.tokens == root) & (places < prefix.position[:, None])            # [B, S]
        last = torch.where(seen, places, -1).amax(1, keepdim=True)                      # [B, 1]
        follower = torch.where(last >= 0, prefix.tokens.gather(1, last.clamp(min=0) + 1), dp.ABSENT)
        return dp.TokenTree.chain(torch.cat([root, follower], 1))


if __name__ == "__main__":
    prompt = "The cat saw the dog. The dog saw the cat. The cat"
    mine = dp.load("demo", drafter=LastFollower(), budget=1).generate(prompt, max_new_tokens=40)[0]
    plain = dp.load("demo", drafter="none").generate(prompt, max_new_tokens=40)[0]
    print(prompt + mine.text)
    print(
        f"the same tokens: {mine.tokens == plain.tokens};",
        f"tokens per round {mine.stats.tokens_per_round:.2f}",
    )
