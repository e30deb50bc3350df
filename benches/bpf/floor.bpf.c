// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * What measuring costs at least: programs at both ends, of a call or of a span
 * between tracepoints, and the clock read in each.
 *
 * Nothing is included, so that any clang compiles it as it is.
 */
#define SEC(name) __attribute__((section(name), used))

static unsigned long long (*bpf_ktime_get_ns)(void) = (void *)5;

SEC("fentry/ip_rcv")
int empty_entry(void *ctx)
{
	(void)ctx;
	return 0;
}

SEC("fexit/ip_rcv")
int empty_exit(void *ctx)
{
	(void)ctx;
	return 0;
}

SEC("fentry/ip_rcv")
int floor_entry(void *ctx)
{
	(void)ctx;
	bpf_ktime_get_ns();
	return 0;
}

SEC("fexit/ip_rcv")
int floor_exit(void *ctx)
{
	(void)ctx;
	bpf_ktime_get_ns();
	return 0;
}

SEC("fentry/__udp_enqueue_schedule_skb")
int floor_enqueue(void *ctx)
{
	(void)ctx;
	bpf_ktime_get_ns();
	return 0;
}

SEC("raw_tp/net_dev_queue")
int floor_start(void *ctx)
{
	(void)ctx;
	bpf_ktime_get_ns();
	return 0;
}

SEC("raw_tp/netif_receive_skb")
int floor_end(void *ctx)
{
	(void)ctx;
	bpf_ktime_get_ns();
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
