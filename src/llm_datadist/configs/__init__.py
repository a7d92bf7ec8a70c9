"""What a program sets before ``LLMDataDist.init`` and passes to ``link_clusters``: roles, options, addresses."""

from llm_datadist.configs.addresses import ip_text, parse_listen_ip_info, trans_str_ip
from llm_datadist.configs.cluster_info import LLMClusterInfo
from llm_datadist.configs.config import LLMConfig, LlmConfig
from llm_datadist.configs.role import LLMRole

__all__ = [
    "LLMClusterInfo",
    "LLMConfig",
    "LLMRole",
    "LlmConfig",
    "ip_text",
    "parse_listen_ip_info",
    "trans_str_ip",
]
