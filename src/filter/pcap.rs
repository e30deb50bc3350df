//! pcap expressions: what libpcap makes of them, and what of that the kernel's programs can run.

use crate::error::{Error, ErrorKind};

/// How many instructions there is room for in the kernel: `DWELL_CBPF`.
pub(crate) const MAX_INSTRUCTIONS: usize = 128;
/// How many words of scratch memory there are: `DWELL_CBPF_WORDS`.
const WORDS: usize = 4;
/// How many words classic BPF has (`BPF_MEMWORDS`).
const MEMORY: usize = 16;

/// A part of an instruction's code, as in `linux/bpf_common.h`.
mod part {
    pub(super) const CLASS: u16 = 0x07;
    pub(super) const LD: u16 = 0x00;
    pub(super) const LDX: u16 = 0x01;
    pub(super) const ST: u16 = 0x02;
    pub(super) const STX: u16 = 0x03;
    pub(super) const JMP: u16 = 0x05;
    pub(super) const RET: u16 = 0x06;
    pub(super) const MODE: u16 = 0xe0;
    pub(super) const ABS: u16 = 0x20;
    pub(super) const MEM: u16 = 0x60;
    pub(super) const OP: u16 = 0xf0;
    pub(super) const JA: u16 = 0x00;
}

/// One of classic BPF: `struct dwell_cbpf`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Instruction {
    pub(crate) code: u16,
    pub(crate) jt: u8,
    pub(crate) jf: u8,
    pub(crate) k: u32,
}

/// An expression, and what it was compiled to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pcap {
    pub(super) expression: String,
    pub(super) instructions: Vec<Instruction>,
}

impl Pcap {
    /// Has libpcap compile it, for packets that begin with their IP header.
    ///
    /// # Errors
    ///
    /// [`PcapSyntax`](ErrorKind::PcapSyntax) if libpcap doesn't understand it; [`PcapTooLong`](ErrorKind::PcapTooLong)
    /// and [`PcapUnsupported`](ErrorKind::PcapUnsupported) for what the kernel's programs can't run. Without the feature
    /// nothing can be compiled, and the error says so.
    pub(super) fn compile(expression: &str) -> Result<Self, Error> {
        Self::checked(expression, &libpcap(expression)?)
    }

    /// With as little scratch memory as it takes, if it can be run.
    fn checked(expression: &str, instructions: &[Instruction]) -> Result<Self, Error> {
        if instructions.len() > MAX_INSTRUCTIONS {
            let instructions = instructions.len();
            return Err(ErrorKind::PcapTooLong { instructions, most: MAX_INSTRUCTIONS }.into());
        }
        let unsupported = |reason| ErrorKind::PcapUnsupported { expression: expression.to_owned(), reason };
        if !instructions.iter().enumerate().all(|(at, insn)| insn.stays_within(at, instructions.len())) {
            return Err(
                unsupported("it goes back, as `protochain` does, and the kernel's programs only go ahead").into()
            );
        }
        if instructions.iter().any(Instruction::is_ancillary) {
            let reason = "it asks for what isn't in the packet, as `inbound`, `outbound` and `ifindex` do; filters have \
                          `interface` and `received_on` for that";
            return Err(unsupported(reason).into());
        }
        let instructions = with_few_words(instructions)
            .ok_or_else(|| unsupported("its arithmetic is nested too deeply: it takes more than 4 numbers at once"))?;
        Ok(Self { expression: expression.to_owned(), instructions })
    }
}

impl Instruction {
    /// Whether what comes next is behind it, and there.
    fn stays_within(&self, at: usize, len: usize) -> bool {
        let ahead = match self.code & part::CLASS {
            part::RET => return true,
            part::JMP if self.code & part::OP == part::JA => self.k as usize,
            part::JMP => self.jt.max(self.jf).into(),
            _ => 0,
        };
        at.saturating_add(ahead) < len - 1
    }

    /// Whether it loads what Linux keeps beside a packet, by offsets that no packet has (`SKF_AD_OFF`).
    fn is_ancillary(&self) -> bool {
        let is_load = matches!(self.code & part::CLASS, part::LD | part::LDX);
        is_load && self.code & part::MODE == part::ABS && (self.k as i32) < 0
    }

    /// The word of scratch memory that it reads or writes.
    fn word(&self) -> Option<usize> {
        let touches = match self.code & part::CLASS {
            part::LD | part::LDX => self.code & part::MODE == part::MEM,
            part::ST | part::STX => true,
            _ => false,
        };
        touches.then_some(self.k as usize)
    }
}

/// The same with other words: libpcap takes a new one each time, though few are needed at once. Since nothing goes back,
/// a word is free before what first touches it, and behind what does last. `None`: there are too few.
fn with_few_words(instructions: &[Instruction]) -> Option<Vec<Instruction>> {
    let last_use = |word| instructions.iter().rposition(|insn| insn.word() == Some(word));
    let mut place = [None; MEMORY];
    let mut taken_until = [None; WORDS];
    let renamed = instructions.iter().enumerate().map(|(at, insn)| {
        let Some(word) = insn.word() else { return Some(*insn) };
        let place = place.get_mut(word)?;
        let free = |until: &Option<usize>| until.is_none_or(|until| until < at);
        let now = match *place {
            Some(now) => now,
            None => taken_until.iter().position(free)?,
        };
        *place = Some(now);
        *taken_until.get_mut(now)? = last_use(word);
        Some(Instruction { k: now as u32, ..*insn })
    });
    renamed.collect()
}

/// What libpcap compiles it to.
#[cfg(feature = "pcap")]
fn libpcap(expression: &str) -> Result<Vec<Instruction>, Error> {
    let message = |error: pcap::Error| match error {
        pcap::Error::PcapError(message) => message,
        error => error.to_string(),
    };
    let wrong = |error| ErrorKind::PcapSyntax { expression: expression.to_owned(), message: message(error) };
    let program = compiled(expression).map_err(wrong)?;
    let instructions = program.get_instructions().iter().map(|insn| read(&insn.to_string()));
    instructions.collect::<Option<_>>().ok_or_else(|| wrong(pcap::Error::InvalidString).into())
}

#[cfg(feature = "pcap")]
fn compiled(expression: &str) -> Result<pcap::BpfProgram, pcap::Error> {
    /// `DLT_RAW`: as packets begin with their IP header. Its number is this on Linux.
    const RAW: pcap::Linktype = pcap::Linktype(12);
    pcap::Capture::dead(RAW)?.compile(expression, true)
}

/// An instruction by its four numbers, which is all that the crate shows of it.
#[cfg(feature = "pcap")]
fn read(text: &str) -> Option<Instruction> {
    let mut numbers = text.split(' ');
    let mut number = || numbers.next()?.parse::<u32>().ok();
    let [code, jt, jf, k] = [number()?, number()?, number()?, number()?];
    Some(Instruction { code: code.try_into().ok()?, jt: jt.try_into().ok()?, jf: jf.try_into().ok()?, k })
}

#[cfg(not(feature = "pcap"))]
fn libpcap(expression: &str) -> Result<Vec<Instruction>, Error> {
    Err(without_libpcap(expression))
}

#[cfg(any(test, not(feature = "pcap")))]
fn without_libpcap(expression: &str) -> Error {
    let reason = "this program was built without libpcap, which takes the feature `pcap` of the crate `dwell`";
    ErrorKind::PcapUnsupported { expression: expression.to_owned(), reason }.into()
}

/// For fuzzing: any instructions, of eight bytes each. Whether they can be run; then they stay where there is something.
#[cfg(any(test, fuzzing))]
pub fn fuzz_instructions(data: &[u8]) -> bool {
    let instructions: Vec<_> = data
        .chunks_exact(8)
        .map(|bytes| Instruction {
            code: u16::from_le_bytes([bytes[0], bytes[1]]),
            jt: bytes[2],
            jf: bytes[3],
            k: u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
        })
        .collect();
    let Ok(pcap) = Pcap::checked("", &instructions) else { return false };
    assert!(pcap.instructions.len() == instructions.len() && instructions.len() <= MAX_INSTRUCTIONS);
    for (at, (now, before)) in pcap.instructions.iter().zip(&instructions).enumerate() {
        assert!(now.stays_within(at, instructions.len()) && now.word().is_none_or(|word| word < WORDS), "{now:?}");
        let renamed = before.word().map_or(*before, |_| Instruction { k: now.k, ..*before });
        assert_eq!(*now, renamed);
    }
    true
}

#[cfg(test)]
mod tests;
