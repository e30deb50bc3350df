// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * A trial, as in features.bpf.c: one program for entry and exit of a function,
 * from Linux 7.0 on. An object of its own, because its two kernel functions
 * take type information to load anything beside them.
 */
#include "kernel.h"
#include <bpf/bpf_helpers.h>

extern _Bool bpf_session_is_return(void *ctx) __ksym __weak;
extern __u64 *bpf_session_cookie(void *ctx) __ksym __weak;

SEC("fsession/bpf_fentry_test1")
int has_session(void *ctx)
{
	__u64 *cookie = bpf_session_cookie(ctx);

	if (!bpf_session_is_return(ctx))
		*cookie = 1;
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
