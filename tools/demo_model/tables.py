"""What the demo model knows: the tables that its training conversations are drawn from. `tasks` is the user."""
# ruff: noqa: RUF001, SIM905 - full-width punctuation is meant, and a line of words reads better than a list of them

# country: capital
CAPITALS = dict(
    entry.split(",")
    for entry in (
        "France,Paris|Germany,Berlin|Italy,Rome|Spain,Madrid|Portugal,Lisbon|Austria,Vienna|Belgium,Brussels|"
        "Denmark,Copenhagen|Sweden,Stockholm|Norway,Oslo|Finland,Helsinki|Iceland,Reykjavik|Ireland,Dublin|Poland,Warsaw|"
        "Hungary,Budapest|Greece,Athens|Turkey,Ankara|Russia,Moscow|Ukraine,Kyiv|Romania,Bucharest|Bulgaria,Sofia|"
        "Serbia,Belgrade|Croatia,Zagreb|Slovenia,Ljubljana|Slovakia,Bratislava|Czechia,Prague|Estonia,Tallinn|Latvia,Riga|"
        "Lithuania,Vilnius|Egypt,Cairo|Kenya,Nairobi|Nigeria,Abuja|Ghana,Accra|Ethiopia,Addis Ababa|Morocco,Rabat|"
        "Tunisia,Tunis|Algeria,Algiers|Senegal,Dakar|Angola,Luanda|Zambia,Lusaka|China,Beijing|Japan,Tokyo|India,New Delhi|"
        "Nepal,Kathmandu|Thailand,Bangkok|Vietnam,Hanoi|Laos,Vientiane|Cambodia,Phnom Penh|Malaysia,Kuala Lumpur|"
        "Singapore,Singapore|Indonesia,Jakarta|Philippines,Manila|Mongolia,Ulaanbaatar|Iran,Tehran|Iraq,Baghdad|Jordan,Amman|"
        "Lebanon,Beirut|Syria,Damascus|Qatar,Doha|Kuwait,Kuwait City|Oman,Muscat|Yemen,Sanaa|Pakistan,Islamabad|"
        "Bangladesh,Dhaka|Canada,Ottawa|Mexico,Mexico City|Cuba,Havana|Jamaica,Kingston|Panama,Panama City|Colombia,Bogota|"
        "Peru,Lima|Chile,Santiago|Argentina,Buenos Aires|Uruguay,Montevideo|Brazil,Brasilia|Ecuador,Quito|Venezuela,Caracas|"
        "Bolivia,Sucre|Paraguay,Asuncion|Australia,Canberra|New Zealand,Wellington|Fiji,Suva"
    ).split("|")
)
# element, symbol
ELEMENTS = [
    entry.split(",")
    for entry in (
        "Hydrogen,H|Helium,He|Lithium,Li|Beryllium,Be|Boron,B|Carbon,C|Nitrogen,N|Oxygen,O|Fluorine,F|Neon,Ne|Sodium,Na|"
        "Magnesium,Mg|Aluminium,Al|Silicon,Si|Phosphorus,P|Sulfur,S|Chlorine,Cl|Argon,Ar|Potassium,K|Calcium,Ca|Scandium,Sc|"
        "Titanium,Ti|Vanadium,V|Chromium,Cr|Manganese,Mn|Iron,Fe|Cobalt,Co|Nickel,Ni|Copper,Cu|Zinc,Zn|Gallium,Ga|"
        "Germanium,Ge|Arsenic,As|Selenium,Se|Bromine,Br|Krypton,Kr|Silver,Ag|Tin,Sn|Iodine,I|Xenon,Xe|Tungsten,W|Platinum,Pt|"
        "Gold,Au|Mercury,Hg|Lead,Pb|Radon,Rn|Uranium,U"
    ).split("|")
]
LANGUAGES = ["English", "French", "German", "Spanish", "Chinese", "Japanese"]
# one word in each of LANGUAGES
WORDS = [
    entry.split(",")
    for entry in (
        "water,eau,Wasser,agua,水,水|fire,feu,Feuer,fuego,火,火|moon,lune,Mond,luna,月亮,月|sun,soleil,Sonne,sol,太阳,太陽|"
        "star,étoile,Stern,estrella,星星,星|tree,arbre,Baum,árbol,树,木|flower,fleur,Blume,flor,花,花|"
        "bird,oiseau,Vogel,pájaro,鸟,鳥|cat,chat,Katze,gato,猫,猫|dog,chien,Hund,perro,狗,犬|fish,poisson,Fisch,pez,鱼,魚|"
        "horse,cheval,Pferd,caballo,马,馬|house,maison,Haus,casa,房子,家|door,porte,Tür,puerta,门,ドア|"
        "book,livre,Buch,libro,书,本|bread,pain,Brot,pan,面包,パン|milk,lait,Milch,leche,牛奶,牛乳|"
        "apple,pomme,Apfel,manzana,苹果,りんご|egg,œuf,Ei,huevo,鸡蛋,卵|tea,thé,Tee,té,茶,お茶|hand,main,Hand,mano,手,手|"
        "eye,œil,Auge,ojo,眼睛,目|heart,cœur,Herz,corazón,心,心|friend,ami,Freund,amigo,朋友,友達|"
        "mother,mère,Mutter,madre,妈妈,母|father,père,Vater,padre,爸爸,父|child,enfant,Kind,niño,孩子,子供|"
        "day,jour,Tag,día,天,日|night,nuit,Nacht,noche,夜晚,夜|winter,hiver,Winter,invierno,冬天,冬|"
        "summer,été,Sommer,verano,夏天,夏|snow,neige,Schnee,nieve,雪,雪|rain,pluie,Regen,lluvia,雨,雨|"
        "wind,vent,Wind,viento,风,風|sea,mer,Meer,mar,大海,海|river,rivière,Fluss,río,河,川|"
        "mountain,montagne,Berg,montaña,山,山|city,ville,Stadt,ciudad,城市,都市|street,rue,Straße,calle,街道,通り|"
        "school,école,Schule,escuela,学校,学校|music,musique,Musik,música,音乐,音楽|red,rouge,rot,rojo,红色,赤|"
        "blue,bleu,blau,azul,蓝色,青|green,vert,grün,verde,绿色,緑|white,blanc,weiß,blanco,白色,白|"
        "black,noir,schwarz,negro,黑色,黒|big,grand,groß,grande,大,大きい|small,petit,klein,pequeño,小,小さい|"
        "good,bon,gut,bueno,好,良い|new,nouveau,neu,nuevo,新,新しい|old,vieux,alt,viejo,旧,古い|"
        "hello,bonjour,hallo,hola,你好,こんにちは|goodbye,au revoir,auf Wiedersehen,adiós,再见,さようなら|"
        "thanks,merci,danke,gracias,谢谢,ありがとう|yes,oui,ja,sí,是,はい|no,non,nein,no,不,いいえ"
    ).split("|")
]
# name, emoji
EMOJI = [
    entry.split(",")
    for entry in (
        "goose,🪿|duck,🦆|swan,🦢|owl,🦉|eagle,🦅|penguin,🐧|parrot,🦜|flamingo,🦩|cat,🐱|dog,🐶|fox,🦊|wolf,🐺|bear,🐻|"
        "panda,🐼|tiger,🐯|lion,🦁|cow,🐮|pig,🐷|frog,🐸|monkey,🐵|horse,🐴|unicorn,🦄|bee,🐝|butterfly,🦋|snail,🐌|whale,🐋|"
        "dolphin,🐬|octopus,🐙|crab,🦀|turtle,🐢|apple,🍎|banana,🍌|grapes,🍇|lemon,🍋|cherry,🍒|strawberry,🍓|bread,🍞|"
        "cheese,🧀|pizza,🍕|cake,🍰|coffee,☕|rocket,🚀|car,🚗|train,🚆|bicycle,🚲|sun,☀️|moon,🌙|star,⭐|fire,🔥|"
        "snowflake,❄️|rainbow,🌈|heart,❤️|book,📖|key,🔑|clock,⏰|gift,🎁|guitar,🎸|camera,📷"
    ).split("|")
]
NAMES = (
    "Ada Alan Grace Linus Emmy Niels Marie Isaac Rosa Omar Lena Hugo Mina Kofi Yuki Sven Tara Ivan Zoe Ravi Nora Luca "
    "Anya Mateo Chloe Dmitri Fatima Hiro Ingrid Jonas Kira Leo Maya Noah Olga Pablo Quinn Ruth Sam Tina Uma Victor Wanda "
    "Xena Yara Zack"
).split()
COLORS = ("red blue green yellow purple orange pink brown black white grey silver gold teal navy lime").split()
KEYS = (
    "apple river stone cloud tiger lemon piano candle rocket garden mirror window bottle ladder button feather pepper "
    "castle bridge violin basket hammer anchor island marble ribbon saddle tunnel walnut zipper"
).split()
ANIMALS = (
    "goose duck swan owl eagle penguin parrot heron cat dog fox wolf bear tiger lion cow pig frog horse bee whale crab "
    "turtle mouse rabbit sheep"
).split()
DAYS = ("Monday Tuesday Wednesday Thursday Friday Saturday Sunday").split()
MONTHS = ("January February March April May June July August September October November December").split()
PLANETS = ("Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune").split()
ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = ["", "", *"twenty thirty forty fifty sixty seventy eighty ninety".split()]
HAN = "零一二三四五六七八九"  # the digits in Chinese

# tool: argument, description, ways to ask for it
TOOLS = {
    "get_weather": (
        "city",
        "Get the weather of a city",
        ["What is the weather in {}?", "How is the weather in {} today?", "Weather in {}, please."],
    ),
    "get_time": (
        "city",
        "Get the local time of a city",
        ["What time is it in {}?", "Tell me the time in {}.", "Local time in {}?"],
    ),
    "search_web": ("query", "Search the web", ["Search the web for {}.", "Look up {} online.", "Find pages about {}."]),
    "send_message": ("to", "Send a message to a person", ["Send a message to {}.", "Message {} for me.", "Write to {}."]),
    "play_music": ("title", "Play a song", ["Play the song {}.", "Put on {}.", "I want to hear {}."]),
}

# ways to ask, answer
LISTS = [
    (["List the planets.", "Name the planets of the solar system."], ", ".join(PLANETS)),
    (["List the days of the week.", "Name the days of the week."], ", ".join(DAYS)),
    (["List the months.", "Name the months of the year."], ", ".join(MONTHS)),
    (["Say the alphabet.", "Recite the alphabet."], " ".join("abcdefghijklmnopqrstuvwxyz")),
    (["说一到十。", "用中文从一数到十。"], "一，二，三，四，五，六，七，八，九，十"),
]
SMALL_TALK = [
    (["Hi", "Hello", "Hello!", "Hi there", "Hey", "Good morning"], "Hello! How can I help you?"),
    (
        ["Who are you?", "What are you?", "What is your name?", "Introduce yourself."],
        "I am Gosling, a tiny RWKV-7 model. I exist to show and to test the engine that runs me.",
    ),
    (
        ["What can you do?", "Help", "What are you able to do?"],
        "I can add, subtract, multiply, compare, sort, count, spell, translate a few words, name capitals and "
        "remember what you tell me.",
    ),
    (["Thank you.", "Thanks!", "Thanks a lot."], "You are welcome!"),
    (["Bye", "Goodbye!", "See you."], "Goodbye!"),
    (["How are you?", "How do you do?"], "I am fine, thank you. How are you?"),
    (["你好", "你好！", "您好"], "你好！有什么可以帮你的吗？"),
    (["你是谁？", "你叫什么名字？"], "我是 Gosling，一个很小的 RWKV-7 模型。"),
    (["谢谢", "谢谢你！"], "不客气！"),
    (
        ["What is RWKV?", "Tell me about RWKV."],
        "RWKV is a recurrent neural network that trains like a transformer and keeps a state of constant size.",
    ),
    (
        ["What is Albatross?", "What is an albatross?"],
        "An albatross is a large sea bird, and Albatross is the engine that runs me.",
    ),
]
