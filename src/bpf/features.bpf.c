// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Programs that are only loaded, never run: does this kernel accept them? */
#include "kernel.h"
#include <bpf/bpf_helpers.h>

/* Atomic compare-and-swap, from Linux 5.12 on. */
SEC("socket")
int has_cmpxchg(void *ctx __attribute__((unused)))
{
	__u64 word = 0;

	return __sync_val_compare_and_swap(&word, 0, 1);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
