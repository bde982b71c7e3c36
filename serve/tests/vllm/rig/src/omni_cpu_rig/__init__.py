# SPDX-License-Identifier: Apache-2.0
"""The unmodified vllm-omni on a CPU: a platform plugin, CPU workers and three tiny pipelines.

``plugin`` holds the entry points, ``platform`` and ``workers`` make vllm-omni run without a GPU, ``pipelines`` declares
the stages, ``models`` and ``diffusion`` are the networks, ``processors`` builds what crosses a connector, and
``checkpoint`` writes the weights.
"""
