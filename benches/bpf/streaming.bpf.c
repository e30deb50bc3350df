// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Records as the crate's programs write them: to the rings of a probe that runs,
 * by the crate's own code, and to a ring buffer of the kernel's. And packets over
 * the loopback device. Each as a test run.
 */
#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "ring.bpf.h"

#define RECORDS 8

/* Linux' number for it, enum bpf_map_type. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4 << 20);
} plain_ring SEC(".maps");

/* What found no room. */
volatile __u64 dropped = 0;

static __always_inline void write_record(struct dwell_keyed_record *r, __u64 n, __u32 cpu)
{
	r->record.start_ns = n;
	r->record.latency_ns = 1000 + n;
	r->record.ret = 0;
	r->record.skb = 0xffff888000001000ULL;
	r->record.end = 0;
	r->record.pid = 1;
	r->record.tid = 2;
	r->record.cpu_start = cpu;
	r->record.cpu_end = cpu;
	r->record.len = 60;
	r->record.suspect = 0;
	__builtin_memset(r->record.comm, 'x', 8);
	__builtin_memset(r->record.comm + 8, 0, 8);
	r->key = r->record.skb;
	r->outcome = DWELL_REACHED;
	r->reason = 0;
	__builtin_memset(&r->flow, 0, sizeof(r->flow));
}

SEC("tc")
int to_cpu_rings(void *ctx __attribute__((unused)))
{
	__u32 cpu = bpf_get_smp_processor_id();

	for (int n = 0; n < RECORDS; n++) {
		struct place place = reserve(cpu, sizeof(struct dwell_keyed_record), ring_stride, 1);

		if (!place.record) {
			__sync_fetch_and_add(&dropped, 1);
			continue;
		}
		write_record(place.record, n, cpu);
		submit(&place, 1);
	}
	return 0;
}

SEC("tc")
int to_ring_buffer(void *ctx __attribute__((unused)))
{
	__u32 cpu = bpf_get_smp_processor_id();

	for (int n = 0; n < RECORDS; n++) {
		struct dwell_keyed_record *r = bpf_ringbuf_reserve(&plain_ring, sizeof(*r), 0);

		if (!r) {
			__sync_fetch_and_add(&dropped, 1);
			continue;
		}
		write_record(r, n, cpu);
		bpf_ringbuf_submit(r, BPF_RB_NO_WAKEUP);
	}
	return 0;
}

/* The loopback device is always the first. */
SEC("tc")
int packet(struct __sk_buff *skb)
{
	return bpf_clone_redirect(skb, 1, 0);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
