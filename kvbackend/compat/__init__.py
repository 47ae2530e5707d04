"""Which versions fit together: the facts as data, the rules as plain functions.

`matrix.json` holds one row per fact, each with its source, its date and whether it was `tested` by us or `published`
by a vendor. `rules` asks the rows; `versions` compares version texts. The doctor and the backends use the same
functions, so a refusal and a diagnosis never disagree. Standard library only.

    >>> from kvbackend.compat import rules
    >>> print(rules.op_cann("npu_sparse_flash_attention", soc="Ascend950PR_9579", cann="9.0.0"))
    npu_sparse_flash_attention on Ascend950PR_9579 with CANN 9.0.0; it needs CANN 9.1.0 or newer: upgrade CANN
"""
