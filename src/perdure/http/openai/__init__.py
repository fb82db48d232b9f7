"""The OpenAI Agents face. Until it is built, its routes say so in that wire's own form."""
