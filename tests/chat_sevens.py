"""`tests/sevens.py` as a `ChatAgent` of two turns by the stock OpenAI client, and a side conversation."""

from openai import AsyncOpenAI

from molt.agents import ChatAgent, ChatAgentRunner, Result


class Sevens(ChatAgent):
    async def run(self, ctx):
        async with AsyncOpenAI(base_url=ctx.openai_url, api_key=ctx.api_key) as client:
            messages, sevens = list(ctx.prompt), 0
            for _ in range(2):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages, max_tokens=4)
                said = reply.choices[0].message
                messages += [said.model_dump(exclude_none=True), {"role": "user", "content": "again"}]
                sevens += (said.content or "").count("7")
            # After the episode's own conversation, for there are no tools to tell them apart by.
            title = [{"role": "system", "content": "You write titles."}, {"role": "user", "content": "title?"}]
            await client.chat.completions.create(model=ctx.model, messages=title, max_tokens=4)
        return Result(reward=sevens / 8)


class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(Sevens)
