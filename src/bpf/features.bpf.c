// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Trials: does this kernel accept such a program? Each is loaded alone. None
 * does anything: the functions are those that the kernel keeps for its own
 * tests, and the tracepoint's programs end at once.
 *
 * No type of the kernel is named here: it would take type information to load
 * even those programs that need none.
 */
#include "kernel.h"
#include <bpf/bpf_helpers.h>

#define UNUSED __attribute__((unused))

/* Atomic compare-and-swap, from Linux 5.12 on. */
SEC("socket")
int has_cmpxchg(void *ctx UNUSED)
{
	__u64 word = 0;

	return __sync_val_compare_and_swap(&word, 0, 1);
}

SEC("fentry/bpf_fentry_test1")
int has_fentry(void *ctx UNUSED)
{
	return 0;
}

SEC("fexit/bpf_fentry_test1")
int has_fexit(void *ctx UNUSED)
{
	return 0;
}

SEC("raw_tp/netif_receive_skb")
int has_raw_tracepoint(void *ctx UNUSED)
{
	return 0;
}

/* Reading through the argument may be refused where the program isn't. */
SEC("tp_btf/netif_receive_skb")
int has_typed_tracepoint(const __u64 *ctx)
{
	const volatile __u64 *skb = (const __u64 *)ctx[0];

	(void)*skb;
	return 0;
}

/* The helper that a kernel under lockdown=confidentiality doesn't offer. */
SEC("raw_tp/netif_receive_skb")
int has_kernel_reads(void *ctx UNUSED)
{
	__u64 word = 0;

	bpf_probe_read_kernel(&word, sizeof(word), (void *)0);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
