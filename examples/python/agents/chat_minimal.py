"""The smallest `ChatAgent`: one call by the stock OpenAI client, and whether the answer is the label.

molt demo --train.agent_path examples/python/agents/chat_minimal.py
"""

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from molt.agents import ChatAgent, ChatAgentRunner, ChatContext, Result


class OneAnswer(ChatAgent):
    async def run(self, ctx: ChatContext) -> Result:
        http = DefaultAsyncHttpxClient(verify=False)  # plain HTTP: else each client loads certificates, for 35 ms
        async with AsyncOpenAI(base_url=ctx.openai_url, api_key=ctx.api_key, http_client=http) as client:
            reply = await client.chat.completions.create(model=ctx.model, messages=ctx.prompt)
        return Result(reward=float((reply.choices[0].message.content or "").strip() == str(ctx.label)))


class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(OneAnswer)
