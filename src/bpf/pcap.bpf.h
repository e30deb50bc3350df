/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What a pcap expression says of a packet: runs the classic BPF that libpcap made of it. The instructions are constants
 * in .rodata, so the verifier sees only what each of them does. All ways to one of them are one, since it knows nothing
 * of the numbers. Without any, none of this is loaded.
 */
#ifndef DWELL_PCAP_H
#define DWELL_PCAP_H

#include "packet.bpf.h"

/* How many there are; 0: there is no expression. User space has checked that they only jump ahead. */
const volatile __u32 cbpf_count = 0;
const volatile struct dwell_cbpf cbpf[DWELL_CBPF] = {};

/* What a test comes out to. */
enum answer {
	NO,
	YES,
	CANNOT_TELL,
};

/* The parts of an instruction's code, as in linux/bpf_common.h. */
enum {
	CBPF_CLASS = 0x07,
	CBPF_LD = 0x00,
	CBPF_LDX = 0x01,
	CBPF_ST = 0x02,
	CBPF_STX = 0x03,
	CBPF_ALU = 0x04,
	CBPF_JMP = 0x05,
	CBPF_RET = 0x06,
	CBPF_MISC = 0x07,

	CBPF_SIZE = 0x18,
	CBPF_H = 0x08,
	CBPF_B = 0x10,

	CBPF_MODE = 0xe0,
	CBPF_IMM = 0x00,
	CBPF_ABS = 0x20,
	CBPF_IND = 0x40,
	CBPF_MEM = 0x60,
	CBPF_LEN = 0x80,
	CBPF_MSH = 0xa0,

	CBPF_OP = 0xf0,
	CBPF_ADD = 0x00,
	CBPF_SUB = 0x10,
	CBPF_MUL = 0x20,
	CBPF_DIV = 0x30,
	CBPF_OR = 0x40,
	CBPF_AND = 0x50,
	CBPF_LSH = 0x60,
	CBPF_RSH = 0x70,
	CBPF_NEG = 0x80,
	CBPF_MOD = 0x90,
	CBPF_XOR = 0xa0,

	CBPF_JA = 0x00,
	CBPF_JEQ = 0x10,
	CBPF_JGT = 0x20,
	CBPF_JGE = 0x30,
	CBPF_JSET = 0x40,

	CBPF_X = 0x08,
	CBPF_A = 0x10,
	CBPF_TXA = 0x80,
};

/* Shifting by more than there is leaves nothing. */
static __always_inline __u32 calculate(__u32 op, __u32 a, __u32 operand)
{
	switch (op) {
	case CBPF_ADD:
		return a + operand;
	case CBPF_SUB:
		return a - operand;
	case CBPF_MUL:
		return a * operand;
	case CBPF_DIV:
		return a / operand;
	case CBPF_OR:
		return a | operand;
	case CBPF_AND:
		return a & operand;
	case CBPF_LSH:
		return operand < 32 ? a << (operand & 31) : 0;
	case CBPF_RSH:
		return operand < 32 ? a >> (operand & 31) : 0;
	case CBPF_NEG:
		return -a;
	case CBPF_MOD:
		return a % operand;
	}
	return a ^ operand;
}

static __always_inline int compare(__u32 op, __u32 a, __u32 operand)
{
	switch (op) {
	case CBPF_JEQ:
		return a == operand;
	case CBPF_JGT:
		return a > operand;
	case CBPF_JGE:
		return a >= operand;
	case CBPF_JSET:
		return !!(a & operand);
	}
	return 0;
}

/*
 * What it says of a packet, from its IP header on. As in libpcap, what isn't in the packet
 * at all answers NO, and so does division by zero; what isn't in the linear part can't be
 * told. Keeps to little stack: what all frames have together is nearly used up.
 */
FUNCTION int run_cbpf(const struct sk_buff *skb, struct dwell_identity *id)
{
	__u32 words[DWELL_CBPF_WORDS] = {};
	__u32 a = any_u32(0), x = any_u32(0), at, length;

	/* For the verifier. */
	if (!skb || !id)
		return CANNOT_TELL;
	at = any_u32(start_of_ip(skb, id));
	if (!at)
		return CANNOT_TELL;
	/* The packet from its IP header on, whichever header the kernel is at. */
	length = any_u32(address((__u64)skb->data) - address((__u64)skb->head) + skb->len - at);
	for (__u32 pc = 0; pc < DWELL_CBPF; pc++) {
		const volatile struct dwell_cbpf *insn = &cbpf[pc];
		__u32 code = insn->code, k = insn->k, class = code & CBPF_CLASS, value, size;
		__u64 offset;

		if (pc >= cbpf_count)
			break;
		switch (class) {
		case CBPF_LD:
		case CBPF_LDX:
			value = k;
			switch (code & CBPF_MODE) {
			case CBPF_MEM:
				value = words[k & (DWELL_CBPF_WORDS - 1)];
				break;
			case CBPF_LEN:
				value = length;
				break;
			case CBPF_ABS:
			case CBPF_IND:
			case CBPF_MSH:
				offset = k;
				if ((code & CBPF_MODE) == CBPF_IND)
					offset += x;
				size = (code & CBPF_SIZE) == CBPF_B ? 1 : (code & CBPF_SIZE) == CBPF_H ? 2 : 4;
				if (offset + size > length)
					return NO;
				value = 0;
				if (header(skb, &value, size, at + offset))
					return CANNOT_TELL;
				value = bpf_ntohl(value) >> (32 - 8 * size);
				if ((code & CBPF_MODE) == CBPF_MSH)
					value = (value & 0xf) * 4;
				break;
			}
			value = any_u32(value);
			if (class == CBPF_LD)
				a = value;
			else
				x = value;
			break;
		case CBPF_ST:
			words[k & (DWELL_CBPF_WORDS - 1)] = a;
			break;
		case CBPF_STX:
			words[k & (DWELL_CBPF_WORDS - 1)] = x;
			break;
		case CBPF_ALU:
			value = code & CBPF_X ? any_u32(x) : k;
			if (!value && ((code & CBPF_OP) == CBPF_DIV || (code & CBPF_OP) == CBPF_MOD))
				return NO;
			a = any_u32(calculate(code & CBPF_OP, a, value));
			break;
		case CBPF_JMP:
			if ((code & CBPF_OP) == CBPF_JA)
				pc += k;
			/* Copies are compared: what one way knows of them would keep it apart from the others. */
			else if (compare(code & CBPF_OP, any_u32(a), code & CBPF_X ? any_u32(x) : k))
				pc += insn->jt;
			else
				pc += insn->jf;
			break;
		case CBPF_RET:
			value = (code & CBPF_SIZE) == CBPF_A ? a : (code & CBPF_SIZE) == CBPF_X ? x : k;
			return value ? YES : NO;
		default:
			if (code & CBPF_TXA)
				a = x;
			else
				x = a;
		}
	}
	return CANNOT_TELL;
}

/*
 * Asked before the tests are made, since the packet itself isn't at hand there; and before
 * anything else is found out, of which the verifier would follow each outcome through all
 * instructions. The answer has the place of what isn't known yet: there is no room for more.
 */
static __always_inline void ask_pcap(const __u64 *ctx, __u32 source, __u32 word, struct subject *subject)
{
	__u32 answer = CANNOT_TELL;

	subject->waiting.identity.known = 0;
	if (source == SUBJECT_SKB)
		answer = run_cbpf((const struct sk_buff *)ctx_word(ctx, word), &subject->waiting.identity);
	subject->waiting.start.len = any_u32(answer);
}

static __always_inline enum answer pcap_answer(const struct subject *subject)
{
	return subject->waiting.start.len;
}

#endif
