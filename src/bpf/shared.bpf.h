/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What all spans of a probe share, and what every record has. */
#ifndef DWELL_SHARED_H
#define DWELL_SHARED_H

#include "dwell.h"

/*
 * What is large is a function of its own, once in the object and not once for
 * each program: that makes attaching faster, and costs a call.
 */
#define FUNCTION static __attribute__((noinline))

/* Any memory can be read, which lockdown forbids. */
const volatile __u32 reads_memory = 1;

/*
 * enum dwell_on. On from when every hook of the probe is live, so that all spans
 * see the same, until it stops. Programs look, also those that end a span: what comes
 * after a start or a release that went unseen because it was off finds it off as
 * well, so nothing is matched with what it left behind. (The exits of calls needn't:
 * see enter() in call.bpf.c.)
 *
 * All objects of a probe have the same map behind these two sections, which are
 * apart so that user space can write each without touching the other.
 */
volatile __u64 probe_on SEC(".data.on") = 0;
/* The reader sleeps, and the next record must wake it. */
volatile __u64 reader_sleeps SEC(".data.wake") = 0;

/*
 * A number of which the verifier knows nothing, so that the ways that lead to it are one again. The switch's upper
 * half is always 0, which it can't know. Turning bytes round, as address() does, hides pointers but not numbers: that
 * Linux 7 looks through.
 */
static __always_inline __u32 any_u32(__u32 number)
{
	return number ^ probe_on >> 32;
}

/* Who runs it; task is NULL where the kernel has no pointer to offer, or it isn't to be followed. */
static __always_inline void identify(struct dwell_record *r, const struct task_struct *task)
{
	const __u64 *words;
	__u64 id;

	if (task) {
		r->pid = task->tgid;
		r->tid = task->pid;
		/* By words: of an array of bytes a compiler makes sixteen copies of a byte. */
		words = (const __u64 *)task->comm;
		asm volatile("" : "+r"(words));
		((__u64 *)r->comm)[0] = words[0];
		((__u64 *)r->comm)[1] = words[1];
		return;
	}
	id = bpf_get_current_pid_tgid();
	r->pid = id >> 32;
	r->tid = id;
	bpf_get_current_comm(r->comm, sizeof(r->comm));
}

#endif
