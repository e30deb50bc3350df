//! Writes BTF as the kernel has it.

/// A BTF that is being written; types are numbered in the order in which they are added.
pub(super) struct Writer {
    pub(super) types: Vec<u8>,
    pub(super) strings: Vec<u8>,
    /// Offsets below it are the base's, as ids below the first are.
    pub(super) first_string: u32,
    pub(super) next_id: u32,
}

impl Writer {
    pub(super) fn new() -> Self {
        Self { types: Vec::new(), strings: vec![0], first_string: 0, next_id: 1 }
    }

    /// The offset of a string, for the types that refer to it.
    pub(super) fn string(&mut self, text: &str) -> u32 {
        if text.is_empty() {
            return 0;
        }
        let at = self.first_string + self.strings.len() as u32;
        self.strings.extend(text.bytes());
        self.strings.push(0);
        at
    }

    /// A type of these three words, the first of which is the name's, and of what follows them; gives its id.
    pub(super) fn add(&mut self, name: &str, kind: u32, vlen: u32, flag: u32, third: u32, tail: &[u32]) -> u32 {
        let name = self.string(name);
        for word in [name, flag << 31 | kind << 24 | vlen, third].iter().chain(tail) {
            self.types.extend(word.to_le_bytes());
        }
        self.next_id += 1;
        self.next_id - 1
    }

    pub(super) fn finish(&self) -> Vec<u8> {
        let mut data = vec![0x9f, 0xeb, 1, 0];
        for word in [24, 0, self.types.len() as u32, self.types.len() as u32, self.strings.len() as u32] {
            data.extend(word.to_le_bytes());
        }
        data.extend(&self.types);
        data.extend(&self.strings);
        data
    }
}
