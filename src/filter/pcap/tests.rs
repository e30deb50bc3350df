use super::*;
use crate::filter::Filter;

const LD_ABS_B: u16 = 0x30;
const LD_MEM: u16 = 0x60;
const ALU_ADD_X: u16 = 0x0c;
const JEQ: u16 = 0x15;
const RET_K: u16 = 0x06;

fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> Instruction {
    Instruction { code, jt, jf, k }
}

fn words(instructions: &[Instruction]) -> Option<Vec<usize>> {
    Some(with_few_words(instructions)?.iter().filter_map(Instruction::word).collect())
}

/// A word is taken again once nobody needs what is in it; more than there are at once are refused.
#[test]
fn scratch_memory() {
    let store = |word| instruction(part::ST, 0, 0, word);
    let load = |word| instruction(LD_MEM, 0, 0, word);
    let add = instruction(ALU_ADD_X, 0, 0, 0);
    let code = [store(15), store(1), add, load(15), load(1), store(3), load(3)];
    assert_eq!(words(&code).unwrap(), [0, 1, 0, 1, 0, 0]);
    let nested = |depth: u32| [(0..depth).map(store).collect::<Vec<_>>(), (0..depth).map(load).collect()].concat();
    assert_eq!(words(&nested(4)).unwrap(), [0, 1, 2, 3, 0, 1, 2, 3]);
    assert_eq!(words(&nested(5)), None);
    assert_eq!(words(&[store(16)]), None);
    // What is no word stays as it is.
    let code = [instruction(LD_ABS_B, 0, 0, 9), instruction(JEQ, 0, 1, 6)];
    assert_eq!(with_few_words(&code).unwrap(), code);
}

/// What goes back, or beyond the end, isn't run; nor is what is too long.
#[test]
fn refuses() {
    let ret = instruction(RET_K, 0, 0, 0);
    let error = |code: &[Instruction]| Pcap::checked("x", code).unwrap_err();
    assert!(Pcap::checked("x", &[instruction(JEQ, 1, 0, 6), ret, ret]).is_ok());
    for code in [
        vec![instruction(JEQ, 2, 0, 6), ret, ret],
        vec![instruction(part::JMP, 0, 0, 2), ret, ret],
        vec![ret, instruction(part::JMP, 0, 0, -1_i32 as u32), ret],
        vec![instruction(LD_ABS_B, 0, 0, 0)],
    ] {
        assert!(matches!(error(&code).kind(), ErrorKind::PcapUnsupported { .. }), "{code:?}");
    }
    assert_eq!(Pcap::checked("x", &[ret; 128]).unwrap().instructions.len(), 128);
    assert!(matches!(error(&[ret; 129]).kind(), ErrorKind::PcapTooLong { instructions: 129, most: 128 }));
}

/// Without libpcap the error says what is missing, also of an expression within a filter.
#[test]
fn without_the_feature() {
    let missing = without_libpcap("ip").to_string();
    assert!(missing.contains("the feature `pcap`"), "{missing}");
    if cfg!(not(feature = "pcap")) {
        let error = "udp and pcap \"ip\"".parse::<Filter>().unwrap_err();
        let ErrorKind::FilterSyntax { position: 14, .. } = error.kind() else { panic!("{error}") };
        assert!(error.to_string().contains(&missing), "{error}");
    }
}

#[cfg(feature = "pcap")]
mod with_libpcap {
    use super::*;
    use crate::filter::compile::Field;
    use crate::filter::random::Random;

    /// As the kernel's program does it, see `pcap.bpf.h`.
    fn passes(instructions: &[Instruction], packet: &[u8]) -> bool {
        let (mut a, mut x, mut words, mut pc) = (0_u32, 0_u32, [0_u32; WORDS], 0);
        loop {
            let Instruction { code, jt, jf, k } = instructions[pc];
            pc += 1;
            let operand = if code & 8 == 0 { k } else { x };
            match code & part::CLASS {
                class @ (part::LD | part::LDX) => {
                    let mode = code & part::MODE;
                    let size = [4, 2, 1][usize::from(code >> 3 & 3)];
                    let offset = k as usize + if mode == 0x40 { x as usize } else { 0 };
                    let value = match mode {
                        0x00 => k,
                        part::MEM => words[k as usize],
                        0x80 => packet.len() as u32,
                        _ => match packet.get(offset..offset + size) {
                            None => return false,
                            Some(bytes) => bytes.iter().fold(0, |value, byte| value << 8 | u32::from(*byte)),
                        },
                    };
                    let value = if mode == 0xa0 { (value & 0xf) * 4 } else { value };
                    *(if class == part::LD { &mut a } else { &mut x }) = value;
                }
                part::ST => words[k as usize] = a,
                part::STX => words[k as usize] = x,
                4 => {
                    a = match code & part::OP {
                        0x00 => a.wrapping_add(operand),
                        0x10 => a.wrapping_sub(operand),
                        0x20 => a.wrapping_mul(operand),
                        0x30 | 0x90 if operand == 0 => return false,
                        0x30 => a / operand,
                        0x90 => a % operand,
                        0x40 => a | operand,
                        0x50 => a & operand,
                        0x60 => a.checked_shl(operand).unwrap_or(0),
                        0x70 => a.checked_shr(operand).unwrap_or(0),
                        0x80 => a.wrapping_neg(),
                        0xa0 => a ^ operand,
                        _ => panic!("{code:#x}"),
                    }
                }
                part::JMP => {
                    let holds = match code & part::OP {
                        part::JA => {
                            pc += k as usize;
                            continue;
                        }
                        0x10 => a == operand,
                        0x20 => a > operand,
                        0x30 => a >= operand,
                        0x40 => a & operand != 0,
                        _ => panic!("{code:#x}"),
                    };
                    pc += usize::from(if holds { jt } else { jf });
                }
                part::RET => return if code & 0x10 == 0 { k != 0 } else { a != 0 },
                _ if code & 0x80 == 0 => x = a,
                _ => a = x,
            }
        }
    }

    /// One that has most of what expressions ask for, of any length, and odd at times.
    fn packet(random: &mut Random) -> Vec<u8> {
        let mut packet: Vec<u8> = (0..20 + random.below(180)).map(|_| random.below(256) as u8).collect();
        let protocol = random.pick(&[6, 17, 1, 58, 132, 44]);
        let transport = if random.below(2) == 0 {
            let words = 5 + random.below(2);
            packet[0] = 0x40 | words as u8;
            packet[9] = protocol;
            packet[6..8].copy_from_slice(&random.pick(&[[0_u8, 0], [0x40, 0], [0, 1]]));
            packet[12..16].copy_from_slice(&random.pick(&[[127, 0, 0, 1], [10, 0, 0, 1]]));
            words as usize * 4
        } else {
            packet[0] = 0x60;
            packet[6] = protocol;
            40
        };
        for (at, ports) in [(transport, [443_u16, 5000, 7]), (transport + 2, [5000, 443, 9])] {
            if let Some(bytes) = packet.get_mut(at..at + 2) {
                bytes.copy_from_slice(&random.pick(&ports).to_be_bytes());
            }
        }
        if random.below(10) == 0 {
            packet[0] = random.below(256) as u8;
        }
        packet
    }

    /// Instructions mean what they mean to libpcap itself, whatever was renamed.
    #[test]
    fn agrees_with_libpcap() {
        let expressions = [
            "tcp port 443 and host 127.0.0.1",
            "udp dst port 5000",
            "ip6",
            "not port 5000",
            "tcp[tcpflags] & tcp-syn != 0",
            "greater 100",
            "less 60 or portrange 5-10",
            "src net 10.0.0.0/8 and not icmp",
            "udp and ip6[4:2] > 1000",
            "ip[0] + ip[1] + ip[2] * ip[3] - (ip[4] & ip[5]) > 3000",
            "ip[1] / ip[8] = 0 or ip[1] % ip[8] = 3",
            "ip[8] / (ip[9] - 6) < 20",
            "ip[1] << (ip[8] & 63) > 7 and ip[4:4] >> 9 > 3 and ip[4] ^ ip[5] > 3 and ip[4] | 3 > 30",
            "ip[ip[8]] = ip[1] or ip[ip[8]:4] > 0x80000000",
            "len - ip[2] > 30 and -ip[1] > 0xffffff80",
            "ip[1] + (ip[2] + (ip[3] + (ip[4] + ip[5]))) > 600",
            "tcp or (udp and (ip[8] > 60 or ip6[7] > 60))",
            "udp and ((ip[9] ^ 1) * 2) % 7 == 4",
            "udp and ip[9] << 1 >> 1 == 17",
            "udp and -1 + ip[9] >= 16",
            "udp and ip[9] << (ip[9] + 15) == 0 and (ip[9] | 0x20) & 0x31 > 48",
            "",
        ];
        let mut random = Random::new(1);
        let mut met = [0; 2];
        for expression in expressions {
            let program = compiled(expression).unwrap_or_else(|error| panic!("{expression}: {error}"));
            let pcap = Pcap::compile(expression).unwrap_or_else(|error| panic!("{expression}: {error}"));
            let mut of_this = [0; 2];
            for _ in 0..3_000 {
                let packet = packet(&mut random);
                let expected = program.filter(&packet);
                assert_eq!(passes(&pcap.instructions, &packet), expected, "{expression}: {packet:?}");
                of_this[usize::from(expected)] += 1;
                met[usize::from(expected)] += 1;
            }
            assert!(of_this[1] > 0 && (expression.is_empty() || of_this[0] > 0), "{expression}: {of_this:?}");
        }
        assert!(met.iter().all(|count| *count > 10_000), "{met:?}");
    }

    /// libpcap's message, and what it compiles to that can't be run.
    #[test]
    fn errors() {
        let error = |expression: &str| Filter::pcap(expression).unwrap_err();
        let syntax = error("port 80 and adn");
        let ErrorKind::PcapSyntax { expression, message } = syntax.kind() else { panic!("{syntax}") };
        assert_eq!(expression, "port 80 and adn");
        assert!(!message.is_empty(), "{syntax}");
        assert!(matches!(error("a\0b").kind(), ErrorKind::PcapSyntax { .. }));
        for expression in ["ip6 protochain 6", "inbound", "not outbound", "tcp or ifindex 3"] {
            assert!(matches!(error(expression).kind(), ErrorKind::PcapUnsupported { .. }), "{expression}");
        }
        assert!(matches!(
            error("ip[1]+(ip[2]+(ip[3]+(ip[4]+(ip[5]+ip[6])))) > 7").kind(),
            ErrorKind::PcapUnsupported { .. }
        ));
        let ports: Vec<_> = (0..60).map(|n| format!("port {}", n * 2)).collect();
        let long = error(&ports.join(" or "));
        assert!(matches!(long.kind(), ErrorKind::PcapTooLong { most: 128, .. }), "{long}");
    }

    /// It is written as it is read, within others, and is a test of its own.
    #[test]
    fn is_a_leaf() {
        let text = r#"udp and not (pcap "udp[0:2] != 5 or \"" or ip)"#;
        let error = text.parse::<Filter>().unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::FilterSyntax { position: 19, .. }), "{error}");
        assert!(error.to_string().contains("libpcap doesn't understand"), "{error}");
        let filter = Filter::ipv4() & !Filter::pcap("tcp[tcpflags] & tcp-syn != 0").unwrap();
        assert_eq!(filter.to_string(), "ip and not pcap \"tcp[tcpflags] & tcp-syn != 0\"");
        assert_eq!(filter.to_string().parse::<Filter>().unwrap(), filter);
        let tests = filter.compile().unwrap();
        assert_eq!((tests.len(), tests[1].field, tests[1].negated), (2, Field::Pcap, true));
        assert!(tests[0].needs_subject() && !tests[1].needs_subject());
        assert_eq!(filter.instructions(), Pcap::compile("tcp[tcpflags] & tcp-syn != 0").unwrap().instructions);
        assert_eq!(Filter::ipv4().instructions(), []);
    }

    /// A span has room for one.
    #[test]
    fn once() {
        let pcap = |expression| Filter::pcap(expression).unwrap();
        let error = (pcap("udp") | !pcap("tcp")).compile().unwrap_err();
        let ErrorKind::PcapTwice { first, second } = error.kind() else { panic!("{error}") };
        assert_eq!((&**first, &**second), ("udp", "tcp"));
        assert_eq!((pcap("udp") & pcap("udp")).compile().unwrap().len(), 2);
    }
}
