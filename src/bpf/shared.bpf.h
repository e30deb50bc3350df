/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What all spans of a probe share, and what every record has. */
#ifndef DWELL_SHARED_H
#define DWELL_SHARED_H

#include "dwell.h"

/* The span's index in its probe. */
const volatile __u32 span = 0;

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4 << 20);
} dwell_ring SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, DWELL_CONTROLS);
	__type(key, __u32);
	__type(value, __u64);
} dwell_control SEC(".maps");

/* The kernel's verifier turns this look-up into an addition. */
static __always_inline __u64 *control(__u32 which)
{
	return bpf_map_lookup_elem(&dwell_control, &which);
}

/*
 * On from when every hook of the probe is live, so that all spans see the same,
 * until it stops. Every program looks, also those that end a span: what comes
 * after a start or a release that went unseen because it was off finds it off as
 * well, so nothing is matched with what it left behind.
 */
static __always_inline int is_on(void)
{
	__u64 *on = control(DWELL_ON);

	return on && *on;
}

/* The reader polls; a record wakes it only where it said that it sleeps. */
static __always_inline __u64 wake_flag(void)
{
	__u64 *wake = control(DWELL_WAKE);

	if (!wake || !*wake)
		return BPF_RB_NO_WAKEUP;
	*wake = 0;
	return BPF_RB_FORCE_WAKEUP;
}

/* Who runs it; task is NULL where the kernel has no pointer to offer. */
static __always_inline void identify(struct dwell_record *r, const struct task_struct *task)
{
	__u64 id;

	if (task) {
		r->pid = task->tgid;
		r->tid = task->pid;
		__builtin_memcpy(r->comm, task->comm, sizeof(r->comm));
		return;
	}
	id = bpf_get_current_pid_tgid();
	r->pid = id >> 32;
	r->tid = id;
	bpf_get_current_comm(r->comm, sizeof(r->comm));
}

#endif
